"""A benchmark's files: the numbers, one picture for papers and messages, one page that needs
nothing else. Both show rows as benched.py made them.
"""

from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

import samecurve
from samecurve.core.profile_types import MEANING, PARTS
from samecurve.experiments.benched import Bench, Values, as_json, columns, dumped, notes
from samecurve.observe.report.canvas import (
    COLOURS,
    SERIES,
    Picture,
    canvas,
    legend_label,
    save_picture,
)
from samecurve.observe.report.markup import Html, element, table
from samecurve.observe.report.page import charts_section, document
from samecurve.observe.report.words import show_moment
from samecurve.units import show_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MADE_BY = "samecurve bench"
_PARTS = {
    "data": "s1",
    "forward": "s0",
    "backward": "s5",
    "device": "s0",
    "sync": "bad",
    "optimizer": "s2",
    "other": "s7",
}
_WIDE = (15.0, 4.2)  # inches, of three panels
_NAMED = 20  # layouts
UNDRAWN = (
    "matplotlib is not installed: no bench.png, and a page without figures; pip install"
    " 'samecurve[report]' draws them"
)


def drawable() -> bool:
    return find_spec("matplotlib") is not None


def files(bench: Bench, rows: Sequence[Values]) -> dict[str, bytes]:
    """By name. Without matplotlib there is no picture, and the page has tables alone."""
    panels: list[tuple[str, str, str, Callable[[Axes], None]]] = []
    measured = [row for row in rows if row["status"] == "measured"]
    if drawable():
        panels = [
            (
                "scaling",
                "Speed-up beside the ideal line",
                _scaling_note(bench),
                lambda axes: _scaling(axes, bench, measured),
            ),
            (
                "shares",
                "Where the mean step goes",
                "; ".join(f"{name}: {MEANING[name]}" for name in PARTS[bench.plans[0].engine]),
                lambda axes: _shares(axes, bench, measured),
            ),
            (
                "memory",
                "Peak memory of each device",
                _memory_note(bench),
                lambda axes: _memory(axes, measured),
            ),
        ]
    pictures = [_picture(*panel) for panel in panels]
    made = {
        "bench.json": dumped(as_json(bench, rows)).encode(),
        "bench.html": _page(bench, rows, pictures).encode("utf-8", "replace"),
    }
    return {**made, "bench.png": _together(bench, panels)} if panels else made


def _picture(name: str, title: str, note: str, draw: "Callable[[Axes], None]") -> Picture:
    with canvas() as (figure, axes):
        draw(axes)
        return save_picture(figure, name, title, note, _MADE_BY)


def _together(
    bench: Bench, panels: "Sequence[tuple[str, str, str, Callable[[Axes], None]]]"
) -> bytes:
    """All panels side by side."""
    with canvas() as (figure, axes):
        axes.remove()
        figure.set_size_inches(*_WIDE)
        for place, (_, title, _, draw) in zip(figure.subplots(1, len(panels)), panels, strict=True):
            draw(place)
            place.set_title(title)
        return save_picture(figure, "bench", _title(bench), "", _MADE_BY).png


def _title(bench: Bench) -> str:
    plan = bench.plans[0]
    return f"{legend_label(bench.name)}: {plan.engine} {plan.precision}, {plan.devices[0].name}" + (
        f", ranks share {bench.cores} cores" if bench.cpu else ""
    )


def _scaling(axes: "Axes", bench: Bench, rows: Sequence[Values]) -> None:
    """A line for each strategy, from the layout that all are held against."""
    base, worlds = rows[0], sorted({row["world"] for row in rows})
    axes.plot(
        [worlds[0], worlds[-1]],
        [1.0, worlds[-1] / worlds[0]],
        color=COLOURS["ink"],
        linestyle=":",
        linewidth=1.2,
        label="ideal",
    )
    lines = {
        strategy: [row for row in rows if row["strategy"] == strategy]
        for strategy in dict.fromkeys(row["strategy"] for row in rows)
    }
    if len(lines) > 1 and lines[base["strategy"]] == [base]:
        del lines[base["strategy"]]  # where all lines begin
    for index, (strategy, own) in enumerate(lines.items()):
        line = own if own[0]["world"] == base["world"] else [base, *own]
        speeds = [row["speedup"] for row in line]
        low, high = (
            [
                abs(
                    row["speedup"]
                    * (row["seconds"]["median"] / row["seconds"]["quartiles"][edge] - 1)
                )
                for row in line
            ]
            for edge in (1, 0)
        )
        axes.errorbar(
            [row["world"] for row in line],
            speeds,
            yerr=[low, high],
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


def _scaling_note(bench: Bench) -> str:
    bound = (
        f" All ranks share {bench.cores} cores, so the ideal line is more than they can be expected"
        " to reach."
        if bench.cpu
        else ""
    )
    return f"Points: the median step; bars: its quartiles.{bound}"


def _shares(axes: "Axes", bench: Bench, rows: Sequence[Values]) -> None:
    left = [0.0] * len(rows)
    for name in PARTS[bench.plans[0].engine]:
        widths = [100 * max(0.0, row["parts"][name]["share"]) for row in rows]
        axes.barh(
            range(len(rows)),
            widths,
            left=left,
            height=0.65,
            color=COLOURS[_PARTS[name]],
            label=name,
        )
        left = [before + width for before, width in zip(left, widths, strict=True)]
    (
        axes.set_yticks(
            range(len(rows)),
            [f"{row['layout']}\n{row['seconds']['median'] * 1e3:.4g} ms" for row in rows],
        )
        if len(rows) <= _NAMED
        else axes.set_ylabel("layout")
    )
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 100)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("% of the mean step, all ranks")
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=6, handlelength=1, columnspacing=1
    )


def _memory(axes: "Axes", rows: Sequence[Values]) -> None:
    """Under each layout its devices, the first one on top; a mark where the plan expected the peak."""
    largest = max(row["memory_bytes"] for row in rows)
    size, unit = next(
        pair
        for pair in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1, "bytes"))
        if largest >= 2 * pair[0] or pair[0] == 1
    )
    for number, row in enumerate(rows):
        peaks = row["memory_bytes_by_device"]
        each = 0.7 / len(peaks)
        for device, peak in enumerate(peaks):
            axes.barh(
                number - 0.35 + each * (device + 0.5),
                peak / size,
                height=each * 0.9,
                color=SERIES[5 if device else 0],
                label="others" if device else "first device",
            )
        if row["memory_estimate_bytes"]:
            axes.plot(
                [row["memory_estimate_bytes"] / size] * 2,
                [number - 0.4, number + 0.4],
                color=COLOURS["ink"],
                linewidth=1.2,
                linestyle=":",
                label="plan's estimate",
            )
    (
        axes.set_yticks(range(len(rows)), [row["layout"] for row in rows])
        if len(rows) <= _NAMED
        else axes.set_ylabel("layout")
    )
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
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


def _memory_note(bench: Bench) -> str:
    return (
        "What a process has had resident, libraries included; devices of one process share it."
        if bench.cpu
        else "What was allocated on each device."
    )


def _page(bench: Bench, rows: Sequence[Values], pictures: Sequence[Picture]) -> str:
    foot = (
        f"Made by {_MADE_BY} {samecurve.__version__}, {show_moment(bench.time)}. The same numbers, and"
        " more of them: bench.json."
    )
    return document(f"bench {bench.name}", _MADE_BY, _body(bench, rows, pictures), foot)


def _peaks(row: Values) -> tuple[str, str]:
    estimate = row["memory_estimate_bytes"]
    return ", ".join(map(show_bytes, row["memory_bytes_by_device"])), (
        show_bytes(estimate) if estimate else "\N{EN DASH}"
    )


def _body(bench: Bench, rows: Sequence[Values], pictures: Sequence[Picture]) -> Iterator[Html]:
    shown, plan = [column for column in columns(bench) if not column.left], bench.plans[0]
    yield element(
        "header",
        element("h1", bench.name),
        element(
            "span",
            f"{plan.engine} {plan.precision}, {plan.devices[0].name},"
            f" {'weak' if bench.weak else 'strong'} scaling",
            class_="quiet",
        ),
    )
    for row in rows:
        if row["status"] != "measured":
            yield element(
                "p",
                f"{row['layout']} {row['status']}: {row['why']}",
                element("br") if row["remedy"] else "",
                row["remedy"],
                class_="note bad" if row["status"] == "failed" else "note",
            )
    yield element("h2", "Layouts")
    yield table(
        ["layout", *(column.title for column in shown)],
        [
            [row["layout"], *(column.cell(row) for column in shown)]
            for row in rows
            if row["status"] == "measured"
        ],
        numbers=True,
    )
    yield table(
        ["", ""],
        [[word, said] for word, _, said in (note.partition(" ") for note in notes(bench, rows))],
    )
    if pictures:
        yield from charts_section(pictures, [])
    else:
        yield element("p", UNDRAWN, class_="note")
    yield element("h2", "Batches and memory")
    yield table(
        ["layout", "batch", "sync", "peak of each device", "plan expects"],
        [
            [row["layout"], row["arithmetic"], row["backend"], *_peaks(row)]
            for row in rows
            if row["status"] == "measured"
        ],
    )
    yield element("h2", "Environment")
    told = {
        **bench.environment.get("versions", {}),
        **{key: value for key, value in bench.environment.items() if key != "versions"},
    }
    yield table(
        ["", ""],
        [
            [key, show_bytes(value) if key == "host_bytes" else str(value)]
            for key, value in told.items()
        ],
    )
