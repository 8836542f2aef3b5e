"""matplotlib as the report uses it.

One drawing gives an SVG that takes its colours from the page (light and dark), and a PNG. The
library is imported here alone, late; a user's own matplotlib settings do not reach in. Colours are
CSS variables of page.css.
"""

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from samecurve.core.system.installation import install_command
from samecurve.errors import UserError
from samecurve.report.markup import Html, escaped
from samecurve.terminal import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MADE_BY = "samecurve report"
_SIZE = (5.4, 3.1)  # inches; text of 10 points is still legible at the width of a phone
_DPI = 150

# Light values of the variables in page.css; in the SVG each is replaced by its variable. Series
# colours: Okabe and Ito, darkened where white is behind.
COLOURS = {
    "ink": "#1d2330",
    "soft": "#c9ced8",
    "bad": "#b3261e",
    "warn": "#b26a00",
    "s0": "#0a67b0",
    "s1": "#c2500a",
    "s2": "#0c8163",
    "s3": "#a5488a",
    "s4": "#8a7308",
    "s5": "#2f8fc9",
    "s6": "#5a4fb0",
    "s7": "#6b6f76",
}
SERIES = [COLOURS[f"s{index}"] for index in range(8)]
STYLES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class Picture:
    name: str  # of its PNG file, report-NAME.png
    title: str
    note: str  # what a reader must know to understand the picture
    svg: Html
    png: bytes


def need_matplotlib() -> None:
    """Refuse with a UserError if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError(
            "a report is drawn with matplotlib, which is not installed here",
            f"{install_command('report')}; --json gives the numbers without it",
            "report",
        ) from None


@contextmanager
def canvas() -> Iterator[tuple["Figure", "Axes"]]:
    """An empty figure with its one pair of axes, drawn and saved within the block."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(), warnings.catch_warnings():
        # the PNG's font may lack the script of a run's name; the page uses the reader's own fonts
        warnings.filterwarnings("ignore", "Glyph .* missing")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(
            {
                "svg.fonttype": "none",
                "text.parse_math": False,
                "font.size": 10,
                "axes.titlesize": 10,
                "legend.fontsize": 9,
                "legend.frameon": False,
                "lines.linewidth": 1.4,
                "axes.spines.top": False,
                "axes.spines.right": False,
                "axes.grid": True,
                "grid.linewidth": 0.6,
                "axes.axisbelow": True,
                "grid.color": COLOURS["soft"],
                "axes.edgecolor": COLOURS["soft"],
                "text.color": COLOURS["ink"],
                "axes.labelcolor": COLOURS["ink"],
                "xtick.color": COLOURS["ink"],
                "ytick.color": COLOURS["ink"],
                "axes.formatter.useoffset": False,
                "axes.formatter.limits": (-4, 6),
            }
        )
        figure = Figure(figsize=_SIZE, layout="constrained")
        yield figure, figure.add_subplot()


def save_picture(
    figure: "Figure", name: str, title: str, note: str, made_by: str = MADE_BY
) -> Picture:
    """Save the figure as SVG and PNG. Call it within the block of canvas()."""
    import matplotlib

    # ids differ between figures, and are the same each time a figure is made
    matplotlib.rcParams["svg.hashsalt"] = name
    vector, raster = io.StringIO(), io.BytesIO()
    figure.savefig(
        vector,
        format="svg",
        transparent=True,
        metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
    )
    figure.suptitle(title, fontsize=10)
    figure.savefig(
        raster, format="png", dpi=_DPI, facecolor="white", metadata={"Software": made_by}
    )
    return Picture(name, title, note, _inline(vector.getvalue(), title), raster.getvalue())


def _inline(svg: str, title: str) -> Html:
    """The <svg> element alone: as wide as its container, in the colours of the page."""
    svg = svg[svg.index("<svg") :]
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    svg = re.sub(
        r'<svg [^>]*?(viewBox="[^"]*")[^>]*>',
        lambda start: f'<svg {start[1]} role="img" aria-label="{escaped(title)}" {names}>',
        svg,
        count=1,
    )
    for variable, colour in COLOURS.items():
        svg = svg.replace(colour, f"var(--{variable})")
    return Html(svg)


def legend_label(text: str, most: int = 36) -> str:
    """A name for a legend: printable, and not too long.

    The end of a long name is kept, since that is where names differ. The label never begins with an
    underscore: matplotlib would hide it.
    """
    shown = printable(text).replace("\n", " ")
    if len(shown) > most:
        shown = f"\N{HORIZONTAL ELLIPSIS}{shown[1 - most :]}"
    if shown.startswith("_"):
        return f" {shown}"
    return shown
