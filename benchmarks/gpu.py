"""Tokens a second, MFU and memory of a config on one GPU, beside others on the same model, batches
and optimizer, alternating in one process.

    python -m benchmarks.gpu                              # models/small.yaml (124M)
    python -m benchmarks.gpu --config models/large.yaml   # 1B; 64 samples a step
    python -m benchmarks.gpu --device cpu --tiny          # the same paths in small, without a GPU:
                                                          # says nothing of speed

Sides: samecurve (its own engine and loop, blocks compiled); plain: a loop as nanoGPT's, the whole
model compiled; the Hugging Face Trainer and Accelerate, compiled too (benchmarks/sides.py). All in
bf16 autocast with weights in f32, clipped at the same norm, by fused AdamW, in the same micro-batch
and rounds. MFU is the plan's FLOPs (docs/plan.md) over the dense peak of the data sheet, and over
the fastest of some large bf16 products measured in the same run. Writes
benchmarks/results/gpu-<machine>-<config>.json after every turn of a side, so that what ends early
leaves what it measured; on a CPU only where --out says.
"""

import argparse
import gc
import json
import math
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._inductor.config as inductor_config
from torch._C._autograd import (
    DeviceType,  # public in torch.autograd, where type checkers do not see it
)

from benchmarks.common import RESULTS, file_name
from benchmarks.sides import SIDES, Setting
from samecurve.core.config.document import read_file
from samecurve.core.config.loading import load
from samecurve.core.config.sections import Config
from samecurve.core.planning.planner import plan
from samecurve.core.system.installation import install_command
from samecurve.observe.text_table import Column, table_text
from samecurve.probe import cpu_name, probe
from samecurve.tasks import Tasks, open_task
from samecurve.units import show_bytes

_VOCABULARY = {
    "small": 50_304,
    "large": 32_000,
}  # GPT-2's, padded, which makes it the 124M model; the config's own. The tokens are drawn
_SAMPLES = {
    "large": 64
}  # of a step: a quarter of the config's, so that all sides fit in ten minutes
_PRODUCTS = ((8192, 8192, 8192), (16384, 8192, 4096), (16384, 8192, 8192))
_LIBRARIES = ("torch", "triton", "transformers", "accelerate", "torchao", "samecurve")
_TINY = {
    "model.hidden_size": 64,
    "model.num_layers": 2,
    "model.num_heads": 4,
    "model.kv_heads": 2,
    "model.intermediate_size": 128,
    "model.max_seq_len": 64,
    "model.vocab_size": 512,
    "batch.samples": 8,
}


@dataclass
class Found:
    """Results of a side. seconds: of a step, by turn. memory: peak bytes; None on a CPU."""

    seconds: list[float]
    memory: int | None


def config_of(arguments: argparse.Namespace, home: Path) -> Config:
    document, name = read_file(arguments.config), arguments.config.stem
    vocabulary = _TINY["model.vocab_size"] if arguments.tiny else _VOCABULARY.get(name, 256)
    np.random.default_rng(0).integers(
        0, vocabulary, 2_000_000 if not arguments.tiny else 50_000, dtype=np.uint16
    ).tofile(home / "tokens.bin")
    batch = arguments.batch or _SAMPLES.get(name) or document.value["batch"].get("samples", 32)
    values = {
        "model.vocab_size": vocabulary,
        "data.source": str(home / "tokens.bin"),
        "data.tokenizer": "bytes",
        "data.token_dtype": "uint16",
        "data.eval_samples": 0,
        "data.prompts": [],
        "batch": {"samples": batch, **({"per_device": arguments.micro} if arguments.micro else {})},
        "train.steps": arguments.warm + arguments.steps + 3,
        "train.precision": "bf16",
        "train.compile": True,
        "devices.use": "0" if arguments.device == "cuda" else "cpu",
        "devices.strategy": "single",
        "schedule.warmup": 1,
        **(_TINY if arguments.tiny else {}),
    }
    for key, value in values.items():
        document.set(key, value, "benchmarks/gpu.py")
    return load(document, Tasks(), name).config


def setting_of(arguments: argparse.Namespace, home: Path) -> Setting:
    config = config_of(arguments, home)
    task = open_task(config, home / "cache")
    made = plan(config, probe(), task.facts())
    if (
        made.batch.global_batch_size % made.batch.micro_batch_size
    ):  # the other trainers have rounds of one size only
        arguments.micro = max(
            size
            for size in range(1, made.batch.micro_batch_size)
            if made.batch.global_batch_size % size == 0
        )
        return setting_of(arguments, home)
    torch.set_num_threads(made.compute.threads)
    return Setting(
        task,
        config,
        made,
        torch.device(made.layout.devices[0].place),
        home,
        arguments.warm,
        arguments.steps,
    )


def ceiling(device: torch.device) -> float | None:
    """FLOP/s of the fastest of several bf16 matrix products. None on a CPU."""
    if device.type != "cuda":
        return None
    best = 0.0
    for m, n, k in _PRODUCTS:
        left, right = (
            torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in ((m, k), (k, n))
        )
        for _ in range(5):
            left @ right
        for _ in range(5):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(20):
                left @ right
            torch.cuda.synchronize()
            best = max(best, 20 * 2 * m * n * k / (time.perf_counter() - began))
    return best


def measured(side: Callable[[Setting], float], setting: Setting) -> tuple[float, int | None]:
    """Run a side: (seconds of a step, peak bytes beyond those that earlier sides left)."""
    torch.compiler.reset()
    gc.collect()  # models and optimizers in cycles
    if setting.device.type != "cuda":
        return side(setting), None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    left = torch.cuda.memory_allocated()
    seconds = side(setting)
    return seconds, torch.cuda.max_memory_allocated() - left


@contextmanager
def profiled(device: torch.device, into: dict[str, Any]) -> Iterator[None]:
    """Profile the block: operations by the device's own time, and the device's idle share."""
    gpu = device.type == "cuda"
    kinds = [
        torch.profiler.ProfilerActivity.CPU,
        *([torch.profiler.ProfilerActivity.CUDA] if gpu else []),
    ]
    began = time.perf_counter()
    with torch.profiler.profile(activities=kinds) as found:
        yield
        if gpu:
            torch.cuda.synchronize()
    wall = time.perf_counter() - began
    entries = [
        entry
        for entry in found.key_averages()
        if (entry.device_type == DeviceType.CUDA) == gpu and not (gpu and entry.is_user_annotation)
    ]
    own = {
        entry.key: (entry.self_device_time_total if gpu else entry.self_cpu_time_total) / 1e6
        for entry in entries
    }
    busy = sum(own.values())
    into["wall_seconds"], into["busy_seconds"], into["idle_share"] = (
        wall,
        busy,
        max(0.0, 1 - busy / wall) if gpu else None,
    )
    into["operations"] = [
        {"name": name, "seconds": seconds, "share": seconds / busy}
        for name, seconds in sorted(own.items(), key=lambda item: -item[1])[:20]
    ]


def version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def result_of(
    setting: Setting,
    found: dict[str, Found],
    skipped: dict[str, str],
    fastest: float | None,
    profile: dict[str, Any],
) -> dict[str, Any]:
    made, gpu = setting.plan, setting.device.type == "cuda"
    sides = {}
    for name, one in found.items():
        if not one.seconds:  # not yet
            continue
        seconds = statistics.median(one.seconds)
        flops = (made.flops_per_step or math.nan) / seconds
        sides[name] = {
            "seconds": one.seconds,
            "tokens_per_second": made.batch.global_batch_size * made.tokens_per_sample / seconds,
            "tflops": flops / 1e12,
            "mfu": flops / made.peak_flops if made.peak_flops else None,
            "mfu_of_ceiling": flops / fastest if fastest else None,
            "memory_bytes": one.memory,
            "time_beside_samecurve": (
                _median_ratio(one.seconds, found["samecurve"].seconds)
                if "samecurve" in found
                else None
            ),
        }
    return {
        "machine": made.layout.devices[0].name if gpu else cpu_name(),
        "driver": made.layout.devices[0].driver,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in _LIBRARIES},
        "model": setting.config.model.model_dump(mode="json"),
        "parameters": sum(math.prod(shape) for shape in setting.task.facts().arrays.values()),
        "batch": made.batch.global_batch_size,
        "micro": made.batch.micro_batch_size,
        "rounds": made.batch.accumulation_steps,
        "steps": setting.steps,
        "precision": made.compute.precision,
        "peak_flops": made.peak_flops,
        "ceiling_flops": fastest,
        "memory_estimate_bytes": made.memory_estimate,
        "sides": sides,
        "skipped": skipped,
        "profile": profile,
    }


def _median_ratio(seconds: list[float], beside: list[float]) -> float | None:
    """The median ratio over the turns that both sides have finished."""
    ratios = [a / b for a, b in zip(seconds, beside, strict=False)]
    return statistics.median(ratios) if ratios else None


def shown(result: dict[str, Any]) -> str:
    """The result as a table, with the costliest operations below it."""
    peaks = {"peak": result["peak_flops"], "products reach": result["ceiling_flops"]}
    known = [
        f"{words} {f'{flops / 1e12:.0f} TFLOP/s' if flops else 'unknown'}"
        for words, flops in peaks.items()
    ]
    rows = [
        [
            name,
            f"{side['tokens_per_second']:.0f}",
            *(_percent(side[key]) for key in ("mfu", "mfu_of_ceiling")),
            show_bytes(side["memory_bytes"]) if side["memory_bytes"] else "-",
            f"x {side['time_beside_samecurve']:.3f}" if side["time_beside_samecurve"] else "-",
        ]
        for name, side in result["sides"].items()
    ]
    titles = ("tokens/s", "MFU", "of products", "memory", "time")
    columns = [Column("side"), *(Column(title, right=True) for title in titles)]
    lines = [
        f"{result['machine']}: {result['parameters'] / 1e6:.0f}M parameters, {result['batch']}"
        f" samples = {result['micro']} x {result['rounds']}, bf16; {', '.join(known)}",
        table_text(columns, rows),
        *(f"  {name} left out: {why}" for name, why in result["skipped"].items()),
    ]
    profile = result["profile"]
    if profile:
        idle = (
            ""
            if profile["idle_share"] is None
            else f"; the device was idle for {profile['idle_share']:.1%}"
        )
        lines += [
            "",
            f"samecurve's last steps under the profiler, {profile['wall_seconds']:.2f} s{idle}",
            *(f"  {one['share']:6.1%}  {one['name'][:110]}" for one in profile["operations"][:12]),
        ]
    return "\n".join(lines)


def _percent(value: float | None) -> str:
    return f"{value:.1%}" if value is not None else "-"


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser with the flags that this benchmark and benchmarks/hf_gpu.py share."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--warm", type=int, default=5, help="first steps of each turn, not timed")
    parser.add_argument("--steps", type=int, default=15, help="timed steps of each turn")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of two layers of 64")
    parser.add_argument("--out", type=Path)
    return parser


def parsed() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--config", type=Path, default=Path(__file__).parents[1] / "models/small.yaml"
    )
    parser.add_argument("--batch", type=int, help="samples of a step")
    parser.add_argument(
        "--micro", type=int, help="samples at once at most; the plan's own if not given"
    )
    parser.add_argument(
        "--sides",
        default=",".join(name for name in SIDES if name != "samecurve-fp8"),
        help=f"of {', '.join(SIDES)}",
    )
    return parser.parse_args()


def place_of(arguments: argparse.Namespace, setting: Setting, kind: str, case: str) -> Path | None:
    """The file of the result; None: the result is not kept."""
    if arguments.out or setting.device.type != "cuda" or arguments.tiny:
        out: Path | None = arguments.out
        return out
    return RESULTS / f"{kind}-{file_name(f'{setting.plan.layout.devices[0].name} {case}')}.json"


def take_turns(
    sides: Mapping[str, Callable[[Setting], float]],
    setting: Setting,
    turns: int,
    keep: Callable[[dict[str, Found]], object],
) -> dict[str, Found]:
    """Measure each side in turn. keep: takes all results so far, after every measurement."""
    found = {name: Found([], None) for name in sides}
    for turn in range(turns):
        for name, one in found.items():
            seconds, one.memory = measured(sides[name], setting)
            one.seconds.append(seconds)
            print(f"turn {turn + 1}  {name}  {seconds * 1e3:.1f} ms a step", flush=True)
            keep(found)
    return found


def main() -> None:
    arguments = parsed()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no GPU here; --device cpu --tiny tries the same paths without one")
    unknown = [name for name in arguments.sides.split(",") if name not in SIDES]
    if unknown:
        raise SystemExit(f"--sides: {', '.join(unknown)}: not among {', '.join(SIDES)}")
    wanted = {name: SIDES[name] for name in arguments.sides.split(",")}
    skipped = {
        name: f"{side.needs} is not installed ({install_command(side.extra)})"
        for name, side in wanted.items()
        if side.needs and version(side.needs) is None
    }
    with tempfile.TemporaryDirectory() as scratch:
        inductor_config.fx_graph_cache = True
        setting = setting_of(arguments, Path(scratch))
        fastest = ceiling(setting.device)
        profile: dict[str, Any] = {}
        place = place_of(arguments, setting, "gpu", arguments.config.stem)

        def write(found: dict[str, Found]) -> dict[str, Any]:
            result = result_of(setting, found, skipped, fastest, profile)
            if place:
                place.write_text(json.dumps(result, indent=1) + "\n")
            return result

        sides = {name: side.run for name, side in wanted.items() if name not in skipped}
        found = take_turns(sides, setting, arguments.turns, write)
        if "samecurve" in found:
            wanted["samecurve"].run(setting, around=lambda: profiled(setting.device, profile))
        print(shown(write(found)))
    if place:
        print(f"written to {place}")


if __name__ == "__main__":
    main()
