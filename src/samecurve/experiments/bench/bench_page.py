"""The files of a benchmark: the numbers, one picture for papers, one self-contained page."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

import samecurve
from samecurve.core.measurement.profile_types import MEANING, PARTS
from samecurve.core.system.installation import install_command
from samecurve.experiments.bench.bench_results import Bench, Row, measured_rows
from samecurve.experiments.bench.bench_text import as_json, dump_json, figures, notes
from samecurve.report.canvas import (
    COLOURS,
    SERIES,
    Picture,
    canvas,
    legend_label,
    save_picture,
)
from samecurve.report.markup import Html, element, table
from samecurve.report.page import charts_section, document
from samecurve.report.words import show_moment
from samecurve.units import show_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MADE_BY = "samecurve bench"
_PART_COLOURS = {
    "data": "s1",
    "forward": "s0",
    "backward": "s5",
    "device": "s0",
    "sync": "bad",
    "optimizer": "s2",
    "other": "s7",
}
_INCHES = (15.0, 4.2)  # width and height of three panels
_MAX_NAMES = 20  # layouts that an axis names
UNDRAWN = (
    "matplotlib is not installed: no bench.png, and a page without pictures;"
    f" {install_command('report')} draws them"
)


@dataclass(frozen=True)
class _Panel:
    """A picture of the page, and a part of bench.png."""

    name: str
    title: str
    note: str
    draw: "Callable[[Axes], None]"

    def picture(self) -> Picture:
        with canvas() as (figure, axes):
            self.draw(axes)
            return save_picture(figure, self.name, self.title, self.note, _MADE_BY)


def drawable() -> bool:
    return find_spec("matplotlib") is not None


def bench_files(bench: Bench, rows: Sequence[Row]) -> dict[str, bytes]:
    """Files of a benchmark, by name. Without matplotlib the page has tables and no picture."""
    panels = []
    if drawable():
        panels = _panels(bench, measured_rows(rows))
    page = _page(bench, rows, [panel.picture() for panel in panels])
    files = {
        "bench.json": dump_json(as_json(bench, rows)).encode(),
        "bench.html": page.encode("utf-8", "replace"),
    }
    if panels:
        files["bench.png"] = _side_by_side(bench, panels)
    return files


def _panels(bench: Bench, measured: Sequence[Row]) -> list[_Panel]:
    parts = "; ".join(f"{name}: {MEANING[name]}" for name in PARTS[bench.plans[0].layout.engine])
    return [
        _Panel(
            "scaling",
            "Speed-up beside the ideal line",
            _scaling_note(bench),
            lambda axes: _draw_scaling(axes, bench, measured),
        ),
        _Panel(
            "shares",
            "Where the mean step goes",
            parts,
            lambda axes: _draw_shares(axes, bench, measured),
        ),
        _Panel(
            "memory",
            "Peak memory of each device",
            _memory_note(bench),
            lambda axes: _draw_memory(axes, measured),
        ),
    ]


def _side_by_side(bench: Bench, panels: Sequence[_Panel]) -> bytes:
    with canvas() as (figure, axes):
        axes.remove()
        figure.set_size_inches(*_INCHES)
        for panel, panel_axes in zip(panels, figure.subplots(1, len(panels)), strict=True):
            panel.draw(panel_axes)
            panel_axes.set_title(panel.title)
        return save_picture(figure, "bench", _title(bench), "", _MADE_BY).png


def _title(bench: Bench) -> str:
    plan = bench.plans[0]
    engine, device = plan.layout.engine, plan.layout.devices[0].name
    title = f"{legend_label(bench.name)}: {engine} {plan.compute.precision}, {device}"
    if bench.cpu:
        title += f", ranks share {bench.cores} cores"
    return title


def _draw_scaling(axes: "Axes", bench: Bench, rows: Sequence[Row]) -> None:
    """Draw a line for each strategy. All lines begin at the baseline layout."""
    base, worlds = rows[0], sorted({row["world"] for row in rows})
    axes.plot(
        [worlds[0], worlds[-1]],
        [1.0, worlds[-1] / worlds[0]],
        color=COLOURS["ink"],
        linestyle=":",
        linewidth=1.2,
        label="ideal",
    )
    lines: dict[str, list[Row]] = {}
    for row in rows:
        lines.setdefault(row["strategy"], []).append(row)
    if len(lines) > 1 and lines[base["strategy"]] == [base]:
        del lines[base["strategy"]]  # where all lines begin
    for index, (strategy, measured) in enumerate(lines.items()):
        points = measured
        if measured[0]["world"] != base["world"]:
            points = [base, *measured]
        axes.errorbar(
            [row["world"] for row in points],
            [row["speedup"] for row in points],
            yerr=[[_speedup_error(row, edge) for row in points] for edge in (1, 0)],
            color=SERIES[index % len(SERIES)],
            marker="o",
            markersize=4,
            capsize=2,
            elinewidth=0.8,
            label=strategy,
        )
    axes.set_xticks(worlds)
    axes.set_xlabel("CPU ranks" if bench.cpu else "devices")
    axes.set_ylabel(f"samples a second, {base['layout']} = 1")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left")


def _speedup_error(row: Row, quartile: int) -> float:
    """Distance of the median speed-up to that of the first (quartile 0) or third quartile (1)."""
    seconds = row["seconds"]
    return float(abs(row["speedup"] * (seconds["median"] / seconds["quartiles"][quartile] - 1)))


def _scaling_note(bench: Bench) -> str:
    note = "Points: the median step; bars: its quartiles."
    if bench.cpu:
        note += (
            f" All ranks share {bench.cores} cores, so the ideal line is more than they can be"
            " expected to reach."
        )
    return note


def _draw_shares(axes: "Axes", bench: Bench, rows: Sequence[Row]) -> None:
    left = [0.0] * len(rows)
    for name in PARTS[bench.plans[0].layout.engine]:
        widths = [100 * max(0.0, row["parts"][name]["share"]) for row in rows]
        axes.barh(
            range(len(rows)),
            widths,
            left=left,
            height=0.65,
            color=COLOURS[_PART_COLOURS[name]],
            label=name,
        )
        left = [before + width for before, width in zip(left, widths, strict=True)]
    _name_rows(axes, [f"{row['layout']}\n{row['seconds']['median'] * 1e3:.4g} ms" for row in rows])
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of the mean step, all ranks")
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=6, handlelength=1, columnspacing=1
    )


def _name_rows(axes: "Axes", names: Sequence[str]) -> None:
    """Name the rows, the first on top. Too many rows are not named."""
    if len(names) <= _MAX_NAMES:
        axes.set_yticks(range(len(names)), names)
    else:
        axes.set_ylabel("layout")
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)


def _draw_memory(axes: "Axes", rows: Sequence[Row]) -> None:
    """Draw the devices of each layout, the first one on top, and mark the plan's estimate."""
    unit, unit_bytes = _memory_unit(max(row["memory_bytes"] for row in rows))
    for number, row in enumerate(rows):
        peaks = row["memory_bytes_by_device"]
        each = 0.7 / len(peaks)
        for device, peak in enumerate(peaks):
            colour, label = SERIES[5], "others"
            if device == 0:
                colour, label = SERIES[0], "first device"
            axes.barh(
                number - 0.35 + each * (device + 0.5),
                peak / unit_bytes,
                height=each * 0.9,
                color=colour,
                label=label,
            )
        if row["memory_estimate_bytes"]:
            axes.plot(
                [row["memory_estimate_bytes"] / unit_bytes] * 2,
                [number - 0.4, number + 0.4],
                color=COLOURS["ink"],
                linewidth=1.2,
                linestyle=":",
                label="plan's estimate",
            )
    _name_rows(axes, [row["layout"] for row in rows])
    axes.set_xlabel(unit)
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(
        handles.values(),
        handles,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.16),
        ncols=3,
        handlelength=1,
    )


def _memory_unit(largest: int) -> tuple[str, int]:
    """The largest unit in which the largest peak is at least 2."""
    for unit, unit_bytes in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if largest >= 2 * unit_bytes:
            return unit, unit_bytes
    return "bytes", 1


def _memory_note(bench: Bench) -> str:
    if bench.cpu:
        return (
            "What a process has had resident, libraries included; devices of one process share it."
        )
    return "What was allocated on each device."


def _page(bench: Bench, rows: Sequence[Row], pictures: Sequence[Picture]) -> str:
    foot = (
        f"Made by {_MADE_BY} {samecurve.__version__}, {show_moment(bench.time)}. The same numbers,"
        " and more of them: bench.json."
    )
    return document(f"bench {bench.name}", _MADE_BY, _body(bench, rows, pictures), foot)


def _body(bench: Bench, rows: Sequence[Row], pictures: Sequence[Picture]) -> Iterator[Html]:
    plan, measured = bench.plans[0], measured_rows(rows)
    scaling = "weak" if bench.weak else "strong"
    engine, device = plan.layout.engine, plan.layout.devices[0].name
    what = f"{engine} {plan.compute.precision}, {device}, {scaling} scaling"
    yield element("header", element("h1", bench.name), element("span", what, class_="quiet"))
    for row in rows:
        if row["status"] != "measured":
            yield _unmeasured(row)
    yield element("h2", "Layouts")
    yield table(
        ["layout", *(figures(bench, measured[0]) if measured else [])],
        [[row["layout"], *figures(bench, row).values()] for row in measured],
        numbers=True,
    )
    noted = [note.partition(" ") for note in notes(bench, rows)]
    yield table(["", ""], [[word, text] for word, _, text in noted])
    if pictures:
        yield from charts_section(pictures, [])
    else:
        yield element("p", UNDRAWN, class_="note")
    yield element("h2", "Batches and memory")
    yield table(
        ["layout", "batch", "sync", "peak of each device", "plan expects"],
        [[row["layout"], row["arithmetic"], row["backend"], *_peaks(row)] for row in measured],
    )
    yield element("h2", "Environment")
    environment = dict(bench.environment)
    environment = {**environment.pop("versions", {}), **environment}
    yield table(["", ""], [[key, _show(key, value)] for key, value in environment.items()])


def _unmeasured(row: Row) -> Html:
    parts: list[object] = [f"{row['layout']} {row['status']}: {row['why']}"]
    if row["remedy"]:
        parts += [element("br"), row["remedy"]]
    return element("p", *parts, class_="note bad" if row["status"] == "failed" else "note")


def _peaks(row: Row) -> tuple[str, str]:
    """The measured peaks and the estimated one."""
    estimate = row["memory_estimate_bytes"]
    peaks = ", ".join(map(show_bytes, row["memory_bytes_by_device"]))
    if not estimate:
        return peaks, "\N{EN DASH}"
    return peaks, show_bytes(estimate)


def _show(key: str, value: object) -> str:
    if key == "host_bytes" and isinstance(value, int):
        return show_bytes(value)
    return str(value)
