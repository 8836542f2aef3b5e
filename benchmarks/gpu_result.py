"""The result of benchmarks/gpu.py and hf_gpu.py: MFU by two formulas, memory, and a table.

Both formulas count 6 FLOPs a token for each weight of a matrix that the token meets, and differ in
attention, with L layers whose heads are d wide together, over T tokens: `mfu` counts 6 L d T, what
a causal kernel computes (the plan's formula); `mfu_12lt` counts 12 L d T, as PaLM and nanoGPT do,
for comparison with figures of others.
"""

import math
import platform
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import torch

from benchmarks.gpu_turns import Found
from benchmarks.sides import Setting
from samecurve.core.planning.plan import Plan
from samecurve.observe.text_table import Column, table_text
from samecurve.probe import cpu_name
from samecurve.units import show_bytes

_LIBRARIES = ("torch", "triton", "transformers", "accelerate", "torchao", "samecurve")
_FORMULAS = {
    "mfu": "6 N + 6 L d T FLOPs a token (causal attention at half)",
    "mfu_12lt": "6 N + 12 L d T (attention in full, as PaLM and nanoGPT count)",
}


def version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def flops_of_step(made: Plan, *, layers: int, width: int) -> dict[str, float]:
    """FLOPs of a step by both formulas. width: of all heads of a layer together.

    The plan's own count is the first; nan where the plan has none.
    """
    tokens = made.batch.global_batch_size * made.data.tokens_per_sample
    causal = made.flops.flops_per_step or math.nan
    return {
        "mfu": causal,
        "mfu_12lt": causal + 6.0 * layers * width * made.data.tokens_per_sample * tokens,
    }


def about_of(setting: Setting) -> dict[str, Any]:
    """What is measured, and on which machine."""
    made, is_gpu = setting.plan, setting.device.type == "cuda"
    fields = setting.config.model.model_dump(mode="json")
    layers = fields.get("num_layers") or fields["num_hidden_layers"]
    return {
        "machine": made.layout.devices[0].name if is_gpu else cpu_name(),
        "device": setting.device.type,
        "driver": made.layout.devices[0].driver,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in _LIBRARIES},
        "model": fields,
        "parameters": sum(math.prod(shape) for shape in setting.task.facts().model.arrays.values()),
        "batch": made.batch.global_batch_size,
        "micro": made.batch.micro_batch_size,
        "rounds": made.batch.accumulation_steps,
        "steps": setting.steps,
        "tokens_per_step": made.batch.global_batch_size * made.data.tokens_per_sample,
        "precision": made.compute.precision,
        "flops_per_step": flops_of_step(made, layers=layers, width=fields["hidden_size"]),
        "flops_formulas": _FORMULAS,
        "peak_flops": made.flops.peak_flops,
        "ceiling_flops": None,
        "memory_estimate_bytes": made.memory_estimate,
    }


def result_of(
    about: Mapping[str, Any], found: Mapping[str, Found], skipped: Mapping[str, str]
) -> dict[str, Any]:
    """about: as about_of gives it. skipped: the reason of each side that has not all its turns."""
    ours = found["samecurve"].seconds if "samecurve" in found else []
    return {
        **about,
        "sides": {name: _side(about, one, ours) for name, one in found.items() if one.seconds},
        "skipped": dict(skipped),
        "profiles": {name: one.profile for name, one in found.items() if one.profile},
    }


def _side(about: Mapping[str, Any], one: Found, ours: list[float]) -> dict[str, Any]:
    seconds = statistics.median(one.seconds)
    speeds = {kind: flops / seconds for kind, flops in about["flops_per_step"].items()}
    peak, fastest = about["peak_flops"], about["ceiling_flops"]
    return {
        "seconds": one.seconds,
        "tokens_per_second": about["tokens_per_step"] / seconds,
        "tflops": speeds["mfu"] / 1e12,
        **{kind: speed / peak if peak else None for kind, speed in speeds.items()},
        "mfu_of_ceiling": speeds["mfu"] / fastest if fastest else None,
        "memory_bytes": one.memory,
        "attention": one.profile.get("attention"),
        "time_beside_samecurve": _median_ratio(one.seconds, ours),
    }


def _median_ratio(seconds: list[float], beside: list[float]) -> float | None:
    """The median ratio over the turns that both sides have finished."""
    ratios = [a / b for a, b in zip(seconds, beside, strict=False)]
    return statistics.median(ratios) if ratios else None


def shown(result: Mapping[str, Any]) -> str:
    """The result as a table, with the sides left out and our costliest operations below it."""
    peaks = {"peak": result["peak_flops"], "products reach": result["ceiling_flops"]}
    known = [
        f"{words} {f'{flops / 1e12:.0f} TFLOP/s' if flops else 'unknown'}"
        for words, flops in peaks.items()
    ]
    rows = [_row(name, side) for name, side in result["sides"].items()]
    titles = ("tokens/s", "MFU", "MFU 12LT", "of products", "memory", "time")
    columns = [Column("side"), *(Column(title, right=True) for title in titles)]
    return "\n".join(
        [
            f"{result['machine']}: {result['parameters'] / 1e6:.0f}M parameters, {result['batch']}"
            f" samples = {result['micro']} x {result['rounds']}, bf16; {', '.join(known)}",
            table_text(columns, rows),
            *(f"  {name} left out, {why}" for name, why in result["skipped"].items()),
            f"  MFU: {_FORMULAS['mfu']}; MFU 12LT: {_FORMULAS['mfu_12lt']}",
            *(
                f"  attention of {name}: {', '.join(side['attention'] or ['no kernel of its own'])}"
                for name, side in result["sides"].items()
                if side["attention"] is not None
            ),
            *golden_lines(result.get("golden", ())),
            *_profile_lines(result["profiles"].get("samecurve")),
        ]
    )


def _row(name: str, side: Mapping[str, Any]) -> list[str]:
    return [
        name,
        f"{side['tokens_per_second']:.0f}",
        *(_percent(side[key]) for key in ("mfu", "mfu_12lt", "mfu_of_ceiling")),
        show_bytes(side["memory_bytes"]) if side["memory_bytes"] else "-",
        f"x {side['time_beside_samecurve']:.3f}" if side["time_beside_samecurve"] else "-",
    ]


def golden_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """How many losses are near enough to the golden ones, and which ones are not."""
    if not rows:
        return []
    counts = Counter(row["verdict"] for row in rows)
    counted = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    failed = [row for row in rows if row["verdict"] == "FAIL"]
    return [f"  losses beside golden ones: {counted}", *map(_failed_line, failed)]


def _failed_line(row: Mapping[str, Any]) -> str:
    away = row["difference"]
    words = [] if away is None else [f"{away:.1e} away, {row['allowed']:.1e} allowed"]
    words += [row["why"]] if row["why"] else []
    return f"    {row['case']} in {row['precision']}: {'; '.join(words)}"


def _profile_lines(profile: Mapping[str, Any] | None) -> list[str]:
    if not profile:
        return []
    share = profile["idle_share"]
    idle = "" if share is None else f"; the device was idle for {share:.1%}"
    return [
        "",
        f"samecurve's last steps under the profiler, {profile['wall_seconds']:.2f} s{idle}",
        *(f"  {one['share']:6.1%}  {one['name'][:110]}" for one in profile["operations"][:12]),
    ]


def _percent(value: float | None) -> str:
    return f"{value:.1%}" if value is not None else "-"
