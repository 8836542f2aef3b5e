"""The picture of `plan --machine`: efficiency over the number of devices, a line a strategy."""

from collections.abc import Sequence

from samecurve.core.simulation.compare import Curve
from samecurve.observe.report.canvas import SERIES, canvas, save_picture

_MARKERS = ("o", "s", "^")


def scaling_png(curves: Sequence[Curve], machine: str, note: str) -> bytes:
    """note: below the picture's title, what it is drawn for.

    UserError: the library that draws is not installed.
    """
    sizes = sorted({size for curve in curves for size, _ in curve.points})
    with canvas() as (figure, axes):
        figure.set_size_inches(7.2, 4.0)
        axes.axhline(1.0, color=SERIES[7], linewidth=0.8, linestyle=":")
        for index, curve in enumerate(curves):
            if curve.points:
                legend = (
                    curve.name
                    if len(curve.points) == len(sizes) or curve.points[-1][0] == sizes[-1]
                    else f"{curve.name}, to {curve.points[-1][0]}"
                )
                axes.plot(
                    *zip(*curve.points, strict=True),
                    color=SERIES[index],
                    marker=_MARKERS[index % 3],
                    markersize=4,
                    label=legend,
                )
            else:
                axes.plot(
                    [],
                    [],
                    color=SERIES[index],
                    marker=_MARKERS[index % 3],
                    markersize=4,
                    label=f"{curve.name}: nowhere",
                )
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.minorticks_off()
        axes.set_ylim(0, 1.08)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.set_xlabel("devices")
        axes.set_title(note, fontsize=9)
        axes.legend(loc="lower left")
        return save_picture(figure, "scaling", f"Predicted efficiency on {machine}", "").png
