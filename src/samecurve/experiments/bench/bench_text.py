"""A benchmark in words and as JSON."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from samecurve.core.measurement.profile_types import MEANING
from samecurve.experiments.bench.bench_results import Bench, Row, measured_rows
from samecurve.units import counted, show_bytes, show_count

_ODD = 1.1  # times what there is to gain


def as_json(bench: Bench, rows: Sequence[Row]) -> dict[str, Any]:
    """The content of bench.json."""
    first, measured = bench.plans[0], measured_rows(rows)
    flops, peak = first.flops_per_step, first.peak_flops
    return {
        "config": bench.name,
        "time": bench.time,
        "engine": first.layout.engine,
        "precision": first.compute.precision,
        "device": first.layout.devices[0].name,
        "kind": first.layout.devices[0].kind,
        "cores": bench.cores,
        "load": bench.load,
        "scaling": "weak" if bench.weak else "strong",
        "tokens_per_sample": first.tokens_per_sample,
        "steps": {"warm_up": bench.schedule.warm, "timed": bench.schedule.timed},
        "baseline": measured[0]["layout"] if measured else None,
        "flops_per_sample": flops / first.batch.global_batch_size if flops else None,
        "flops_formula": bench.formulas.get("flops"),
        "peak_flops_per_device": peak / first.layout.num_devices if peak else None,
        "layouts": list(rows),
        "notes": notes(bench, rows),
        "environment": dict(bench.environment),
    }


def dump_json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=1)


@dataclass(frozen=True)
class Column:
    """A column of the table."""

    title: str
    width: int
    cell: Callable[[Row], str]  # of a measured row
    left: bool = False  # a text, not a number

    def padded(self, text: str) -> str:
        if self.left:
            return text.ljust(self.width)
        return text.rjust(self.width)


def columns(bench: Bench) -> list[Column]:
    """Columns of the table and of the page, as this benchmark needs them."""
    first = bench.plans[0]
    rate = "tokens" if first.tokens_per_sample > 1 else "samples"
    shown = []
    if bench.config.devices.balance != "even":
        shown.append(Column("microbatches", 12, lambda row: " + ".join(map(str, row["slots"]))))
    if bench.cpu and first.layout.engine == "torch":
        shown.append(Column("threads", 7, lambda row: f"{row['world']} x {row['threads']}"))
    shown += [
        Column("ms a step (min to max)", 24, _step_cell),
        Column(f"{rate}/s", 9, lambda row: show_count(row[f"{rate}_per_second"])),
        Column("speed-up", 8, lambda row: f"{row['speedup']:.2f}"),
        Column("efficiency", 10, lambda row: f"{row['efficiency']:.1%}"),
        *(_share_column(name) for name in ("compute", "sync", "data", "other")),
    ]
    if first.peak_flops and first.flops_per_step:
        shown.append(Column("MFU", 6, lambda row: f"{row['mfu']:.1%}" if row["mfu"] else "-"))
    elif first.flops_per_step:
        shown.append(Column("TFLOP/s", 7, lambda row: f"{row['flops_per_second'] / 1e12:.3g}"))
    return [*shown, Column("memory of a device", 0, _memory_cell, left=True)]


def _share_column(name: str) -> Column:
    def cell(row: Row) -> str:
        if name not in row["shares"]:
            return "-"
        return f"{row['shares'][name]:.1%}"

    return Column(name, 7, cell)


def _step_cell(row: Row) -> str:
    median, least, most = (row["seconds"][key] * 1e3 for key in ("median", "min", "max"))
    return f"{median:.4g} ({least:.4g} to {most:.4g})"


def _memory_cell(row: Row) -> str:
    """The first one's apart, since under dp it holds more than the others."""
    first, *others = row["memory_bytes_by_device"]
    if not others or show_bytes(first) == show_bytes(min(others)) == show_bytes(max(others)):
        return show_bytes(first)
    the_others = "the other" if len(others) == 1 else "the others at most"
    return f"{show_bytes(first)} the first, {show_bytes(max(others))} {the_others}"


def head(bench: Bench, width: int) -> str:
    """width: of the layouts' names."""
    plan, batch, schedule = bench.plans[0], bench.config.batch, bench.schedule
    if bench.weak:
        each = f"{batch.per_device}"
        if batch.accumulate:
            each += f" x {batch.accumulate}"
        scaling = f"weak scaling: the batch grows with the devices, {each} samples on each"
    else:
        scaling = (
            f"strong scaling: a step is {plan.batch.global_batch_size} samples in every layout,"
            " divided among its devices"
        )
    warm_up = f"{counted(schedule.warm, 'step')} to warm up"
    titles = "  ".join(column.padded(column.title) for column in columns(bench))
    lines = [
        f"bench  {bench.name}, {plan.layout.engine} {plan.compute.precision} on"
        f" {plan.layout.devices[0].name}; {scaling}",
        f"       {warm_up}, thrown away, then {schedule.timed} timed; each layout in processes of"
        " its own",
        f"       {'layout':<{width}}  {titles}".rstrip(),
    ]
    return "\n".join(lines)


def line(bench: Bench, row: Row, width: int) -> str:
    """A line of the table, with notes about this row below it."""
    name = f"       {row['layout']:<{width}}"
    if row["status"] != "measured":
        first, *more = row["why"].splitlines()
        if row["remedy"]:
            first += f" ({row['remedy']})"
        lines = [f"{name}  {row['status']}: {first}"]
        lines += [f"         {text}" for text in more]
    else:
        cells = "  ".join(column.padded(column.cell(row)) for column in columns(bench))
        lines = [f"{name}  {cells}".rstrip()]
        lines += [f"         without {option}" for option in row["without"]]
    return "\n".join(lines)


def notes(bench: Bench, rows: Sequence[Row]) -> list[str]:
    """Notes that a reader of the numbers needs, each with a word in front."""
    measured = measured_rows(rows)
    if not measured:
        return []
    base = measured[0]
    lines = [
        f"base   speed-up: samples a second against {base['layout']}; efficiency: speed-up /"
        f" (devices / {base['world']})",
        f"share  of the mean step. {_shares_meaning(bench)}",
    ]
    if bench.cpu:
        lines += _core_notes(bench, base, measured)
        lines.append(
            f"memory what a process has had resident, libraries included{_shared_memory(measured)}"
        )
    lines += [*_doubts(bench, base, measured), _flops_note(bench)]
    short = [row["layout"] for row in measured if row["steps"]["timed"] < bench.schedule.timed]
    if short:
        lines.append(f"steps  an epoch's short tail is left out: {', '.join(short)}")
    warnings: dict[str, list[str]] = {}
    for row in measured:
        for warning in row["warnings"]:
            warnings.setdefault(warning, []).append(row["layout"])
    lines += [f"warn   {', '.join(layouts)}: {warning}" for warning, layouts in warnings.items()]
    return lines


def _shares_meaning(bench: Bench) -> str:
    if bench.plans[0].layout.engine == "jax":
        compute = f"compute: {MEANING['device']}; what of it is sync is not known"
    else:
        compute = f"compute: forward, backward, optimizer; sync: {MEANING['sync']}"
    return f"{compute}; data: {MEANING['data']}"


def _core_notes(bench: Bench, base: Row, measured: Sequence[Row]) -> list[str]:
    """Notes on what a CPU can't show."""
    cores = bench.cores
    if bench.plans[0].layout.engine == "jax":
        note = (
            f"cpu    CPU devices share {cores} cores and one process's threads: more of them"
            " bring no more cores, so this shows what sharing out costs, not how GPUs scale"
        )
    else:
        bound = max(_bound(bench, base, row) for row in measured)
        note = (
            f"cpu    ranks share {cores} cores, {_thread_counts(measured)}: a speed-up is bounded"
            f" by cores, here by {bound:.3g}. This shows what sharing out costs, not how GPUs scale"
        )
        if not bench.config.devices.threads:
            note += "; --set devices.threads=1 gives each rank of every layout one thread"
    crowded = [row["layout"] for row in measured if row["world"] > cores]
    if not crowded:
        return [note]
    return [note, f"cpu    {', '.join(crowded)}: more ranks than cores, so they take turns"]


def _thread_counts(measured: Sequence[Row]) -> str:
    layouts_by_count: dict[int, list[str]] = {}
    for row in measured:
        count = row["world"] * row["threads"]
        layouts_by_count.setdefault(count, []).append(row["layout"])
    if len(layouts_by_count) == 1:
        return f"each layout has {next(iter(layouts_by_count))} threads in all"
    counts = [
        f"{count} ({', '.join(layouts)})" for count, layouts in sorted(layouts_by_count.items())
    ]
    return f"threads in all: {', '.join(counts)}"


def _shared_memory(measured: Sequence[Row]) -> str:
    """Layouts whose devices are in one process."""
    shared = [row for row in measured if row["processes"] < row["world"]]
    if not shared:
        return ""
    how = "divided by" if shared[0]["engine"] == "jax" else "of the one process for all"
    return f"; {', '.join(row['layout'] for row in shared)}: {how} its devices"


def _bound(bench: Bench, base: Row, row: Row) -> float:
    """How often the baseline's devices a layout has: cores on the CPU."""
    if bench.cpu and bench.plans[0].layout.engine == "torch":
        cores = min(row["world"] * row["threads"], bench.cores)
        base_cores = min(base["world"] * base["threads"], bench.cores)
        return float(cores / base_cores)
    return float(row["world"] / base["world"])


def _doubts(bench: Bench, base: Row, measured: Sequence[Row]) -> list[str]:
    """Numbers that can't be, and a machine that did something else."""
    lines = []
    too_fast = [
        row["layout"] for row in measured if row["speedup"] > _ODD * _bound(bench, base, row)
    ]
    if too_fast:
        resource = "cores" if bench.cpu else "devices"
        doubt = (
            f"odd    {', '.join(too_fast)}: faster than {resource}"
            f" explain, so {base['layout']} was held up, or a smaller share fits caches better"
        )
        if bench.cpu:
            doubt += (
                ". Threads of one process wait for each other at every operation: where other"
                " programs want the cores, that costs most"
            )
        lines.append(doubt)
    if bench.cpu and bench.load > max(1.0, bench.cores / 2):
        lines.append(
            f"busy   other programs wanted the cores when this began (load {bench.load:.1f} on"
            f" {bench.cores}): the measurements are noisy"
        )
    return lines


def _flops_note(bench: Bench) -> str:
    plan = bench.plans[0]
    if not plan.flops_per_step:
        return "flops  neither MFU nor TFLOP/s: the task does not say what a sample costs"
    work = (
        f"{show_count(plan.flops_per_step / plan.batch.global_batch_size)}FLOP a sample"
        f" ({bench.formulas.get('flops', 'as the task says')})"
    )
    device = plan.layout.devices[0].name
    if not plan.peak_flops:
        return f"flops  samples a second x {work}; no MFU: the peak of {device} is not on file"
    peak = show_count(plan.peak_flops / plan.layout.num_devices)
    return (
        f"MFU    samples a second x {work} / peak; peak: {peak}FLOP/s a device, dense"
        f" {plan.compute.precision} of the {device}'s data sheet"
    )
