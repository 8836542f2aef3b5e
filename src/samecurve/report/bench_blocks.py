"""A benchmark as blocks, made from the content of its bench.json alone."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from samecurve.core.measurement.profile_types import MEANING, PARTS
from samecurve.report.blocks import (
    COLOURS,
    Bar,
    Block,
    Cell,
    Colour,
    Line,
    Tone,
    bars,
    chart,
    header,
    heading,
    table,
    text,
)
from samecurve.report.steps import number
from samecurve.units import show_bytes, show_count

Content = Mapping[str, Any]  # of bench.json
Row = Mapping[str, Any]  # an entry of its `layouts`

_PART_COLOURS: dict[str, Colour] = {
    "data": 1,
    "forward": 0,
    "backward": 5,
    "device": 0,
    "sync": "bad",
    "optimizer": 2,
    "other": "quiet",
}
_DAMAGED = (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError)


def bench_blocks(content: Content) -> list[Block]:
    """The blocks of a benchmark. ValueError: the content is not that of a bench.json."""
    try:
        return list(_blocks(content))
    except _DAMAGED as error:
        raise ValueError(f"no bench.json of this version: {error}") from error


def measured_rows(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["status"] == "measured"]


def _blocks(content: Content) -> Iterator[Block]:
    measured = measured_rows(content["layouts"])
    yield header(
        str(content["config"]),
        quiet=f"{content['engine']} {content['precision']}, {content['device']},"
        f" {content['scaling']} scaling",
    )
    for row in content["layouts"]:
        if row["status"] != "measured":
            tone: Tone = "bad" if row["status"] == "failed" else "warn"
            words = f"{row['why']}\n{row['remedy']}"
            yield text(words.strip(), tone, title=f"{row['layout']} {row['status']}:")
    if not measured:
        return
    yield heading("Layouts")
    yield table(
        ["layout", *figures(content, measured[0])],
        [[row["layout"], *figures(content, row).values()] for row in measured],
        numbers=True,
    )
    noted = [str(note).partition(" ") for note in content["notes"]]
    yield table([], [[word, words.strip()] for word, _, words in noted])
    yield heading("Charts")
    yield from (_speedups(content, measured), _shares(content, measured), _memory(measured))
    yield heading("Batches and memory")
    batches = [[row["layout"], row["arithmetic"], row["backend"], *_peaks(row)] for row in measured]
    yield table(["layout", "batch", "sync", "peak of each device", "plan expects"], batches)
    yield heading("Environment")
    environment = dict(content["environment"])
    environment = {**environment.pop("versions", {}), **environment}
    yield table([], [[str(key), _show(key, value)] for key, value in environment.items()])


def figures(about: Content, row: Row) -> dict[str, str]:
    """The figures of a measured layout by the titles of their columns."""
    shown = {}
    if about.get("balance", "even") != "even":
        shown["microbatches"] = " + ".join(map(str, row["slots"]))
    if about["kind"] == "cpu" and about["engine"] == "torch":
        shown["threads"] = f"{row['world']} x {row['threads']}"
    median, least, most = (row["seconds"][key] * 1e3 for key in ("median", "min", "max"))
    shares, unit = row["shares"], unit_of(about)
    shown |= {
        "ms a step (min to max)": f"{median:.4g} ({least:.4g} to {most:.4g})",
        f"{unit}/s": show_count(row[f"{unit}_per_second"]),
        "speed-up": f"{row['speedup']:.2f}",
        "efficiency": f"{row['efficiency']:.1%}",
        **{
            name: f"{shares[name]:.1%}" if name in shares else "-"
            for name in ("compute", "sync", "data", "other")
        },
    }
    if about["peak_flops_per_device"] and about["flops_per_sample"]:
        shown["MFU"] = f"{row['mfu']:.1%}" if row["mfu"] else "-"
    elif about["flops_per_sample"]:
        shown["TFLOP/s"] = f"{row['flops_per_second'] / 1e12:.3g}"
    return shown


def unit_of(about: Content) -> str:
    """The unit that a throughput counts."""
    return "tokens" if about["tokens_per_sample"] > 1 else "samples"


def _speedups(content: Content, rows: Sequence[Row]) -> Block:
    """A line for each strategy beside the ideal one. All lines begin at the baseline layout."""
    base, worlds = rows[0], sorted({row["world"] for row in rows})
    ideal: Line = {"label": "ideal", "colour": 7, "dash": 2}
    lines: list[Line] = [
        {**ideal, "x": _numbers(worlds), "y": _numbers(world / base["world"] for world in worlds)}
    ]
    by_strategy: dict[str, list[Row]] = {}
    for row in rows:
        by_strategy.setdefault(row["strategy"], []).append(row)
    if len(by_strategy) > 1 and by_strategy[base["strategy"]] == [base]:
        del by_strategy[base["strategy"]]  # where all lines begin
    for index, (strategy, measured) in enumerate(by_strategy.items()):
        points = measured if measured[0]["world"] == base["world"] else [base, *measured]
        lines.append(
            {
                "label": strategy,
                "x": _numbers(row["world"] for row in points),
                "y": _numbers(row["speedup"] for row in points),
                "errors": (
                    _numbers(_speedup_at(row, 1) for row in points),
                    _numbers(_speedup_at(row, 0) for row in points),
                ),
                "colour": index % (COLOURS - 1),
                "points": True,
            }
        )
    note = "Points: the median step; bars: its quartiles."
    if content["kind"] == "cpu":
        note += (
            f" All ranks share {content['cores']} cores, so the ideal line is more than they can be"
            " expected to reach."
        )
    devices = "CPU ranks" if content["kind"] == "cpu" else "devices"
    return chart(
        "scaling",
        f"Speed-up: samples a second, {base['layout']} = 1",
        lines,
        y={"format": "number", "from_zero": True},
        x={"kind": "own", "label": devices, "ticks": worlds},
        note=note,
    )


def _speedup_at(row: Row, quartile: int) -> float:
    """The speed-up of the first (0) or third (1) quartile of the steps."""
    return float(row["speedup"] * row["seconds"]["median"] / row["seconds"]["quartiles"][quartile])


def _numbers(values: Iterable[object]) -> list[float | None]:
    return [None if math.isnan(value) else value for value in map(number, values)]


def _shares(content: Content, rows: Sequence[Row]) -> Block:
    names = PARTS[content["engine"]]
    shown: list[Bar] = [
        {
            "label": f"{row['layout']}, {row['seconds']['median'] * 1e3:.4g} ms",
            "parts": [
                {
                    "label": name,
                    "value": max(0.0, number(row["parts"][name]["share"], 0.0)),
                    "colour": _PART_COLOURS[name],
                }
                for name in names
            ],
        }
        for row in rows
    ]
    note = "; ".join(f"{name}: {MEANING[name]}" for name in names)
    return bars("shares", "Where the mean step goes", shown, form="percent", note=note)


def _memory(rows: Sequence[Row]) -> Block:
    """The peaks of each layout's devices; the first device apart where it holds more or less."""
    shown: list[Bar] = []
    for row in rows:
        first, *others = row["memory_bytes_by_device"]
        peaks = {row["layout"]: max(first, *others, 0)}
        if others and show_bytes(first) != show_bytes(max(others)):
            peaks = {f"{row['layout']}, first device": first, "the others at most": max(others)}
        for label, peak in peaks.items():
            bar: Bar = {
                "label": label,
                "parts": [{"label": "measured peak", "value": number(peak, 0.0), "colour": 0}],
            }
            if row["memory_estimate_bytes"]:
                estimate = number(row["memory_estimate_bytes"], 0.0)
                bar["marks"] = [{"label": "plan's estimate", "value": estimate}]
            shown.append(bar)
    return bars("memory", "Peak memory of a device", shown, form="bytes")


def _peaks(row: Row) -> tuple[Cell, Cell]:
    """The measured peaks and the estimated one."""
    estimate = row["memory_estimate_bytes"]
    peaks = ", ".join(map(show_bytes, row["memory_bytes_by_device"]))
    return peaks, show_bytes(estimate) if estimate else "\N{EN DASH}"


def _show(key: str, value: object) -> str:
    if key == "host_bytes" and isinstance(value, int):
        return show_bytes(value)
    return str(value)
