"""A benchmark as blocks, made from the content of its bench.json alone."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from samecurve.core.measurement.profile_types import MEANING, PARTS
from samecurve.seam import show_bytes, show_count
from samecurve_products.report import blocks
from samecurve_products.report.blocks import COLOURS, Bar, Block, Colour, Line, table
from samecurve_products.report.columns import plain
from samecurve_products.report.plan_blocks import peak_bar
from samecurve_products.report.steps import number
from samecurve_products.report.words import show_value

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
    yield blocks.header(
        str(content["config"]),
        quiet=f"{content['engine']} {content['precision']}, {content['device']},"
        f" {content['scaling']} scaling",
    )
    for row in content["layouts"]:
        if row["status"] != "measured":
            tone: blocks.Tone = "bad" if row["status"] == "failed" else "warn"
            words = f"{row['why']}\n{row['remedy']}".strip()
            yield blocks.text(words, tone, title=f"{row['layout']} {row['status']}:")
    if not measured:
        return
    yield blocks.heading("Layouts")
    yield table(
        ["layout", *figures(content, measured[0])],
        [[str(row["layout"]), *figures(content, row).values()] for row in measured],
        numbers=True,
    )
    noted = [str(note).partition(" ") for note in content["notes"]]
    yield table([], [[word, words.strip()] for word, _, words in noted])
    yield blocks.heading("Charts")
    yield from (_speedups(content, measured), _shares(content, measured), _memory(measured))
    yield blocks.heading("Batches and memory")
    batches = []
    for row in measured:
        estimate = row["memory_estimate_bytes"]
        peaks = ", ".join(map(show_bytes, row["memory_bytes_by_device"]))
        expected = show_bytes(estimate) if estimate else "\N{EN DASH}"
        names = [str(row[name]) for name in ("layout", "arithmetic", "backend")]
        batches.append([*names, peaks, expected])
    yield table(["layout", "batch", "sync", "peak of each device", "plan expects"], batches)
    yield blocks.heading("Environment")
    environment = dict(content["environment"])
    environment = {**environment.pop("versions", {}), **environment}
    yield table([], [[str(key), show_value(value, key)] for key, value in environment.items()])


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
    speedups = plain(world / base["world"] for world in worlds)
    ideal: Line = {"label": "ideal", "colour": 7, "dash": 2, "x": plain(worlds), "y": speedups}
    lines = [ideal]
    by_strategy: dict[str, list[Row]] = {}
    for row in rows:
        by_strategy.setdefault(row["strategy"], []).append(row)
    if len(by_strategy) > 1 and by_strategy[base["strategy"]] == [base]:
        del by_strategy[base["strategy"]]  # where all lines begin
    for index, (strategy, measured) in enumerate(by_strategy.items()):
        points = measured if measured[0]["world"] == base["world"] else [base, *measured]
        line: Line = {"label": str(strategy), "colour": index % (COLOURS - 1), "points": True}
        line["x"] = plain(row["world"] for row in points)
        line["y"] = plain(row["speedup"] for row in points)
        low, high = (plain(_speedup_at(row, quartile) for row in points) for quartile in (1, 0))
        lines.append({**line, "errors": (low, high)})
    note = "Points: the median step; bars: its quartiles."
    if content["kind"] == "cpu":
        note += (
            f" All ranks share {content['cores']} cores, so the ideal line is more than they can be"
            " expected to reach."
        )
    devices = "CPU ranks" if content["kind"] == "cpu" else "devices"
    return blocks.chart(
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


def _shares(content: Content, rows: Sequence[Row]) -> Block:
    names = PARTS[content["engine"]]
    shown = []
    for row in rows:
        shares = {name: max(0.0, number(row["parts"][name]["share"], 0.0)) for name in names}
        parts = [(name, share, _PART_COLOURS[name]) for name, share in shares.items()]
        shown.append(Bar(f"{row['layout']}, {row['seconds']['median'] * 1e3:.4g} ms", parts))
    note = "; ".join(f"{name}: {MEANING[name]}" for name in names)
    return blocks.bars("shares", "Where the mean step goes", shown, form="percent", note=note)


def _memory(rows: Sequence[Row]) -> Block:
    """The peaks of each layout's devices; the first device apart where it holds more or less."""
    shown: list[Bar] = []
    for row in rows:
        estimate = number(row["memory_estimate_bytes"], 0.0)
        first, *others = row["memory_bytes_by_device"]
        peaks = {row["layout"]: max(first, *others, 0)}
        if others and show_bytes(first) != show_bytes(max(others)):
            peaks = {f"{row['layout']}, first device": first, "the others at most": max(others)}
        shown += [
            peak_bar(str(label), number(peak, 0.0), estimate) for label, peak in peaks.items()
        ]
    return blocks.bars("memory", "Peak memory of a device", shown, form="bytes")
