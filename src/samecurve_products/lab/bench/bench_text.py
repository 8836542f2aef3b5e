"""A benchmark in words and as JSON."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from samecurve.core.measurement.profile_types import MEANING
from samecurve.features.balance import balance_of
from samecurve.seam import Column, counted, show_bytes, show_count, table_text
from samecurve_products.lab.bench.bench_results import Bench
from samecurve_products.lab.bench.doubts import busy_machine, doubtful_speedups, speedup_bound
from samecurve_products.report.bench_blocks import Row, figures, measured_rows, unit_of


def as_json(bench: Bench, rows: Sequence[Row]) -> dict[str, Any]:
    """The content of bench.json."""
    measured = measured_rows(rows)
    return {
        **_about(bench),
        "baseline": measured[0]["layout"] if measured else None,
        "layouts": list(rows),
        "notes": notes(bench, rows),
        "environment": dict(bench.environment),
    }


def _about(bench: Bench) -> dict[str, Any]:
    """The content of bench.json without what was measured."""
    first = bench.plans[0]
    flops, peak = first.flops.flops_per_step, first.flops.peak_flops
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
        "balance": balance_of(bench.config),
        "tokens_per_sample": first.data.tokens_per_sample,
        "steps": {"warm_up": bench.schedule.warm, "timed": bench.schedule.timed},
        "flops_per_sample": flops / first.batch.global_batch_size if flops else None,
        "flops_formula": bench.formulas.get("flops"),
        "peak_flops_per_device": peak / first.layout.num_devices if peak else None,
    }


def dump_json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=1)


def _memory_cell(row: Row) -> str:
    """The memory of the devices; the first device apart, which holds more under dp."""
    first, *others = row["memory_bytes_by_device"]
    if not others or show_bytes(first) == show_bytes(min(others)) == show_bytes(max(others)):
        return show_bytes(first)
    the_others = "the other" if len(others) == 1 else "the others at most"
    return f"{show_bytes(first)} the first, {show_bytes(max(others))} {the_others}"


def head(bench: Bench) -> str:
    """The lines before the first measurement."""
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
    return (
        f"bench  {bench.name}, {plan.layout.engine} {plan.compute.precision} on"
        f" {plan.layout.devices[0].name}; {scaling}\n"
        f"       {warm_up}, thrown away, then {schedule.timed} timed; each layout in processes of"
        " its own"
    )


def line(bench: Bench, row: Row) -> str:
    """The result of a layout as soon as it is there, with notes about the layout below it."""
    if row["status"] == "measured":
        unit = unit_of(_about(bench))
        rate = show_count(row[f"{unit}_per_second"])
        result = f"{row['seconds']['median'] * 1e3:.4g} ms a step, {rate} {unit}/s"
        more = [f"without {option}" for option in row["without"]]
    else:
        first, *more = row["why"].splitlines()
        result = f"{row['status']}: {first}"
        if row["remedy"]:
            result += f" ({row['remedy']})"
    return "\n         ".join([f"       {row['layout']}  {result}", *more])


def table(bench: Bench, rows: Sequence[Row]) -> str:
    """The table of all measured layouts. At least one is measured."""
    measured, about = measured_rows(rows), _about(bench)
    columns = [Column(title, right=True) for title in figures(about, measured[0])]
    cells = [[row["layout"], *figures(about, row).values(), _memory_cell(row)] for row in measured]
    return table_text([Column("layout"), *columns, Column("memory of a device")], cells)


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
    cores = bench.cores if bench.cpu else None
    doubts = (doubtful_speedups(base, measured, cores), busy_machine(bench.load, cores))
    lines += [*filter(None, doubts), _flops_note(bench)]
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
        bound = max(speedup_bound(base, row, cores) for row in measured)
        note = (
            f"cpu    ranks share {cores} cores, {_thread_counts(measured)}: a speed-up is bounded"
            f" by cores, here by {bound:.3g}. This shows what sharing out costs, not how GPUs scale"
        )
        if not (bench.config.devices.threads or bench.config.train.asks_same_bits):
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
    """A remark on layouts whose devices share one process."""
    shared = [row for row in measured if row["processes"] < row["world"]]
    if not shared:
        return ""
    how = "divided by" if shared[0]["engine"] == "jax" else "of the one process for all"
    return f"; {', '.join(row['layout'] for row in shared)}: {how} its devices"


def _flops_note(bench: Bench) -> str:
    plan = bench.plans[0]
    if not plan.flops.flops_per_step:
        return "flops  neither MFU nor TFLOP/s: the work of a sample is not known"
    work = (
        f"{show_count(plan.flops.flops_per_step / plan.batch.global_batch_size)}FLOP a sample"
        f" ({bench.formulas.get('flops', 'as the task says')})"
    )
    device = plan.layout.devices[0].name
    if not plan.flops.peak_flops:
        return f"flops  samples a second x {work}; no MFU: the peak of {device} is not on file"
    peak = show_count(plan.flops.peak_flops / plan.layout.num_devices)
    return (
        f"MFU    samples a second x {work} / peak; peak: {peak}FLOP/s a device, dense"
        f" {plan.compute.precision} of the {device}'s data sheet"
    )
