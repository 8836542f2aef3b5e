"""The picture of `plan --machine`: efficiency over the number of devices, a line a strategy."""

from collections.abc import Sequence

from samecurve.report.canvas import SERIES, canvas, save_picture
from samecurve.simulation.forecast import Curve

_MARKERS = ("o", "s", "^")


def scaling_png(curves: Sequence[Curve], *, machine: str, note: str) -> bytes:
    """Draw the efficiency curves; return a PNG. note: the assumptions, below the title.

    UserError: matplotlib is not installed.
    """
    sizes = sorted({size for curve in curves for size, _ in curve.points})
    with canvas() as (figure, axes):
        figure.set_size_inches(7.2, 4.0)
        axes.axhline(1.0, color=SERIES[7], linewidth=0.8, linestyle=":")
        for index, curve in enumerate(curves):
            axes.plot(
                [size for size, _ in curve.points],
                [efficiency for _, efficiency in curve.points],
                color=SERIES[index],
                marker=_MARKERS[index % len(_MARKERS)],
                markersize=4,
                label=_legend(curve, sizes),
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.minorticks_off()
        axes.set_ylim(0, 1.08)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.set_xlabel("devices")
        axes.set_title(note, fontsize=9)
        axes.legend(loc="lower left")
        title = f"Predicted efficiency on {machine}"
        return save_picture(figure, "scaling", title, "").png


def _legend(curve: Curve, sizes: Sequence[int]) -> str:
    if not curve.points:
        return f"{curve.name}: nowhere"
    largest = curve.points[-1][0]
    if len(curve.points) == len(sizes) or largest == sizes[-1]:
        return curve.name
    return f"{curve.name}, to {largest}"
