"""A chart or bars block as a PNG file, drawn by matplotlib: for papers and messages.

The library is imported here alone, late; a user's own matplotlib settings do not reach in.
"""

import base64
import io
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np

from samecurve.seam import (
    UserError,
    install_command,
    printable,
    show_bytes,
    show_count,
    show_seconds,
)
from samecurve_products.report.blocks import Block, Page
from samecurve_products.report.columns import ENCODINGS
from samecurve_products.report.steps import Column

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

AXES = {"step": "step", "seconds": "seconds of training", "samples": "samples", "tokens": "tokens"}
# Okabe and Ito, darkened where white is behind: the light colours of page.css
_SERIES = [
    *("#0a67b0", "#c2500a", "#0c8163", "#a5488a"),
    *("#8a7308", "#2f8fc9", "#5a4fb0", "#6b6f76"),
]
_TONES = {"bad": "#b3261e", "quiet": "#6b6f76"}
_INK, _SOFT = "#1d2330", "#c9ced8"
_STYLE: Mapping[Any, object] = {
    "text.parse_math": False,
    "font.size": 10,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _SOFT,
    "axes.edgecolor": _SOFT,
    "text.color": _INK,
}
_DASHES = ("-", "--", ":", "-.")
_SIZE = (5.4, 3.1)  # inches; text of 10 points is still legible at the width of a phone
_DPI = 150
_MOST_DRAWN = 1e100  # beyond it matplotlib's own arithmetic has no numbers
# of the axis below bars: the largest of which there are two
_UNITS = {
    "bytes": ((1 << 30, "GiB"), (1 << 20, "MiB"), (1, "bytes")),
    "seconds": ((3600, "hours"), (60, "minutes"), (1, "seconds")),
    "percent": ((0.01, "%"),),
}
_FORMATS: Mapping[str, Callable[[float], str]] = {
    "percent": lambda value: f"{100 * value:.4g} %",
    "percent100": lambda value: f"{value:.4g} %",
    "bytes": show_bytes,
    "seconds": show_seconds,
    "watts": lambda value: f"{value:.4g} W",
    "celsius": lambda value: f"{value:.4g} \N{DEGREE SIGN}C",
}


def need_matplotlib(flag: str) -> None:
    """Refuse with a UserError if matplotlib is not installed. flag: what asked for a picture."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError(
            f"{flag}: pictures are drawn with matplotlib, which is not installed here",
            f"{install_command('report')}; or leave {flag} out",
            flag,
        ) from None


def png(blocks: Sequence[Block], page: Page, *, made_by: str, axis: str = "step") -> bytes:
    """Charts or bars side by side in one PNG.

    page: has the runs whose columns are drawn
    axis: a key of AXES, the x axis of charts over steps
    """
    with _figure(len(blocks)) as (figure, all_axes):
        for block, axes in zip(blocks, all_axes, strict=True):
            note = block["note"] if len(blocks) == 1 else ""  # no room beside others
            axes.set_title("\n".join([block["title"], *wrap(note, 80)[:2]]), fontsize=9)
            if block["type"] == "bars":
                _draw_bars(axes, block)
            else:
                _draw_chart(axes, block, page, axis)
        content, about = io.BytesIO(), {"Software": made_by}
        figure.savefig(content, format="png", dpi=_DPI, facecolor="white", metadata=about)
        return content.getvalue()


@contextmanager
def _figure(count: int) -> "Iterator[tuple[Figure, list[Axes]]]":
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the script of a run's name
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        figure = Figure(figsize=(_SIZE[0] * count, _SIZE[1]), layout="constrained")
        yield figure, list(figure.subplots(1, count, squeeze=False)[0])


def _draw_chart(axes: "Axes", block: Block, page: Page, axis: str) -> None:
    x_axis, y_axis = block.get("x") or {}, block["y"]
    own = x_axis.get("kind") == "own"
    for line in block["lines"]:
        _draw_line(axes, line, *_points(line, page, "" if own else axis))
    if x_axis.get("log2"):
        axes.set_xscale("log", base=2)
    if x_axis.get("ticks"):
        axes.set_xticks(x_axis["ticks"], [f"{tick:,}" for tick in x_axis["ticks"]])
        axes.minorticks_off()
    else:
        axes.xaxis.set_major_formatter(lambda value, _: _tick(value, "number"))
    axes.yaxis.set_major_formatter(lambda value, _: _tick(value, y_axis["format"]))
    if y_axis.get("from_zero"):
        axes.set_ylim(bottom=0)
    axes.set_xlabel(x_axis["label"] if own else AXES[axis])
    if len(block["lines"]) > 1:
        axes.legend(loc="best")


def _draw_line(axes: "Axes", line: Mapping[str, Any], x: Column, y: Column) -> None:
    colour, dash = _colour(line["colour"]), _DASHES[line.get("dash", 0) % len(_DASHES)]
    marker = "o" if line.get("points") or len(x) == 1 else None
    label = _label(line["label"])
    axes.plot(x, y, color=colour, linestyle=dash, marker=marker, markersize=3, label=label)
    if "low" in line:
        low, high = _numbers(line["low"]), _numbers(line["high"])
        axes.fill_between(x, low, high, alpha=0.2, color=colour)
    if "errors" in line:
        edges = [np.abs(_numbers(edge) - y) for edge in line["errors"]]
        axes.errorbar(x, y, yerr=edges, color=colour, capsize=2, elinewidth=0.8, fmt="none")


def _colour(colour: int | str) -> str:
    return _TONES[colour] if isinstance(colour, str) else _SERIES[colour % len(_SERIES)]


def _points(line: Mapping[str, Any], page: Page, axis: str) -> tuple[Column, Column]:
    """The line's points. axis: of the run's columns; '': the x of the line is its own."""
    if "column" in line:
        arrays = page["runs"][line["run"]]["columns"]["arrays"]
        return _numbers(arrays[axis]), _numbers(arrays[line["column"]])
    x = _numbers(line["x"])
    arrays = page["runs"][line["run"]]["columns"]["arrays"] if axis and "run" in line else {}
    if axis in arrays and len(arrays["step"]):
        x = np.interp(x, _numbers(arrays["step"]), _numbers(arrays[axis]))
    return x, _numbers(line["y"])


def _numbers(array: Any) -> Column:
    """An Array of a page; a gap, and what is too large to be drawn, is nan."""
    if isinstance(array, dict):
        (form, text), *_ = array.items()
        values = np.frombuffer(base64.b64decode(text), ENCODINGS[form])
    else:
        values = np.array(array, np.float64)  # None becomes nan
    values = values.astype(np.float64)
    return np.where(np.abs(values) <= _MOST_DRAWN, values, np.nan)


def _draw_bars(axes: "Axes", block: Block) -> None:
    rows, seen = block["rows"], set[str]()
    largest = max((sum(part["value"] for part in bar["parts"]) for bar in rows), default=0)
    units = _UNITS[block["format"]]
    size, unit = next(unit for unit in units if largest >= 2 * unit[0] or unit[0] <= 1)

    def once(label: str) -> str:
        """A label for the legend, the first time; later ones are hidden."""
        shown = "_" if label in seen else _label(label)
        seen.add(label)
        return shown

    for row, bar in enumerate(rows):
        left = 0.0
        for part in bar["parts"]:
            value, label = min(float(part["value"]) / size, _MOST_DRAWN), once(part["label"])
            colour = _colour(part["colour"])
            axes.barh([row], [value], left=left, height=0.6, color=colour, label=label)
            left += value
        for mark in bar["marks"]:
            line, label = [float(mark["value"]) / size] * 2, once(mark["label"])
            axes.plot(line, [row - 0.4, row + 0.4], color=_INK, linestyle=":", label=label)
    axes.set_yticks(range(len(rows)), [_label(bar["label"]) for bar in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(unit)
    if seen:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=3)


def _tick(value: float, form: str) -> str:
    if form in _FORMATS:
        return _FORMATS[form](value)
    return f"{value:.4g}" if abs(value) < 1e4 else show_count(value)


def _label(text: str, most: int = 36) -> str:
    """A name for a legend: printable, and not too long.

    The end of a long name is kept, since that is where names differ. The label never begins with an
    underscore: matplotlib would hide it.
    """
    shown = printable(text).replace("\n", " ")
    if len(shown) > most:
        shown = f"\N{HORIZONTAL ELLIPSIS}{shown[1 - most :]}"
    return f" {shown}" if shown.startswith("_") else shown
