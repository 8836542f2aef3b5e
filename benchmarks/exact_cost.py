"""What train.exact costs on one device, and whether train.exact: auto takes it there.

Models of several sizes on one CPU rank of one thread, in whole batches and exactly; with --device
on a GPU, in the memory and rounds that a CPU rank is planned for. On a GPU auto takes nothing.

Both sides train the same batches in one process, step by step in turn. Seconds are those of the CPU
that computes, which other programs on the machine change least; with engine jax, whose threads are
XLA's, those of the whole process. Writes benchmarks/results/cost-of-exact-<machine>.json unless
--no-keep; with --compile (both sides by torch.compile) compiled-cost-of-exact-<machine>.json, with
--engine jax jax-cost-of-exact-<machine>.json; with --device cuda:0 the machine is the GPU.
Run: python -m benchmarks.exact_cost [--steps 20] [--models "har;..."] [--compile] [--engine jax]
[--device cuda:0] [--dtype bf16] [--no-keep]
"""

import argparse
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import paired
from benchmarks.exact import Runner
from benchmarks.page import publish
from samecurve.core.config.document import read_document
from samecurve.core.planning.exact_auto import least_work
from samecurve.probe import cpu_name, probe
from samecurve.torch_engine.precision import set_deterministic
from samecurve.worker.cublas import set_repeating_workspace

WARM = 2
MODELS_HOME = Path(__file__).parents[1] / "models"


def language(hidden: int, layers: int, length: int, batch: int) -> dict[str, Any]:
    """A decoder on lines of text."""
    return {
        "model": {
            "hidden_size": hidden,
            "num_layers": layers,
            "num_heads": hidden // 64,
            "kv_heads": hidden // 64,
            "intermediate_size": hidden * 27 // 10 // 16 * 16,
            "max_seq_len": length,
            "tie_embeddings": True,
        },
        "data": {"eval_samples": 0},
        "batch": {"samples": batch},
    }


MODELS: Mapping[str, Mapping[str, Any] | str] = {
    "har": "har.yaml",
    "har, in 4": "har.yaml",
    "har, in 8": "har.yaml",
    "digits": "digits.yaml",
    "decoder 128x4, 8 x 64 tokens": language(128, 4, 64, 64),
    "decoder 128x4, 8 x 256 tokens": language(128, 4, 256, 64),
    "decoder 128x4, 16 x 256 tokens": language(128, 4, 256, 128),
    "decoder 256x6, 2 x 128 tokens": language(256, 6, 128, 16),
    "decoder 256x6, 4 x 256 tokens": language(256, 6, 256, 32),
    "decoder 320x8, 2 x 128 tokens": language(320, 8, 128, 16),
    "decoder 320x8, 8 x 128 tokens": language(320, 8, 128, 64),
    "decoder 128x4, 8 x 128 tokens, in 4": language(128, 4, 128, 32),
    "decoder 256x6, 8 x 128 tokens, in 2": language(256, 6, 128, 16),
    "shapes-unet, in 2": "shapes-unet.yaml",
    "tiny-llama, in 2": "tiny-llama.yaml",
    "tiny-masked, in 2": "tiny-masked.yaml",
}
ON_GPU: Mapping[str, Mapping[str, Any]] = {  # some that have work for a GPU
    "decoder 768x12, 2 x 1024 tokens": language(768, 12, 1024, 16),
    "decoder 768x12, 8 x 1024 tokens": language(768, 12, 1024, 64),
    "decoder 1024x24, 4 x 1024 tokens": language(1024, 24, 1024, 32),
}
IN = re.compile(r", in (\d+)$")  # microbatches of a step, where they are not 8


def values_of(
    name: str, text: Path, steps: int, models: Mapping[str, Mapping[str, Any] | str]
) -> dict[str, Any]:
    """The values of a config. name: of a model; text: that a decoder learns"""
    of = models[name]
    if isinstance(of, str):
        values = dict(read_document(MODELS_HOME / of).value)
    else:
        values = {**of, "data": {**of["data"], "source": str(text)}}
    values["train"] = {**values.get("train", {}), "steps": steps}
    if in_fewer := IN.search(name):
        values["train"]["exact_devices"] = int(in_fewer.group(1))
    return values


def seconds_in_turn(
    runners: Mapping[str, Runner], steps: int, prepare: Callable[[str], object]
) -> dict[str, list[float]]:
    """Seconds of each step by mode, the modes in turn; the runners are closed then.

    prepare: is called with the mode before each of its steps
    """
    seconds: dict[str, list[float]] = {mode: [] for mode in runners}
    for number in range(WARM + steps):
        for mode, runner in runners.items():
            prepare(mode)
            took = runner.step()
            if number >= WARM:
                seconds[mode].append(took)
    for runner in runners.values():
        runner.close()
    return seconds


def race(values: Mapping[str, Any], home: Path, steps: int, place: str) -> dict[str, Any]:
    """Train in both modes, step by step in turn. place: the device"""
    clock = time.thread_time
    if values["engine"] == "jax":
        clock = time.process_time
    elif place != "cpu":
        clock = time.perf_counter
    runners = {
        mode: Runner(
            {**values, "train": {**values["train"], "exact": is_exact}},
            home,
            place=place,
            clock=clock,
        )
        for mode, is_exact in (("whole batches", False), ("exact", True))
    }

    def prepare(mode: str) -> None:
        if values["engine"] == "torch":
            set_deterministic(mode == "exact", torch.device(place))

    seconds = seconds_in_turn(runners, steps, prepare)
    exact = runners["exact"]
    facts, batch = exact.facts, exact.plan.batch
    return {
        "arrays": facts.model.arrays,
        "params": facts.params,
        "trainable": facts.trainable,
        "flops_per_sample": facts.flops_per_sample,
        "samples": batch.global_batch_size,
        "microbatch": batch.micro_batch_size,
        "least_work": least_work(facts, compiled=values["train"]["compile"]),
        "ratio": paired(seconds["exact"], seconds["whole batches"], lambda a, b: a / b),
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--models", default="", help="names with ; between them")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--engine", choices=("torch", "jax"), default="torch")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="f32")
    parser.add_argument("--no-keep", action="store_true")
    given = parser.parse_args()
    if given.device != "cpu":
        set_repeating_workspace(os.environ, cuda_started=False)
    torch.set_num_threads(1)
    devices: dict[str, Any] = {"use": "cpu", "threads": 1}
    if given.engine == "jax":
        from samecurve.jax_engine.runtime import FIXED_THREADS

        os.environ["PJRT_NPROC"] = str(FIXED_THREADS)  # both sides share one pool of threads
        devices = {"use": "cpu"}
    models = {}
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        (home / "text.txt").write_text("".join(f"{i} squared is {i * i}\n" for i in range(200_000)))
        known = MODELS if given.device == "cpu" else {**MODELS, **ON_GPU}
        for name in given.models.split(";") if given.models else known:
            values = values_of(name, home / "text.txt", WARM + given.steps, known)
            values |= {"engine": given.engine, "devices": devices}
            values["train"] |= {"compile": given.compile, "precision": given.dtype}
            models[name] = race(values, home, given.steps, given.device)
            one = models[name]
            line = f"{name}: {1e3 * statistics.median(one['seconds']['exact']):.1f} ms, ratio"
            line += f" {one['ratio']:.3f}"
            work = one["flops_per_sample"] * one["microbatch"] / one["least_work"]
            line += f", {work:.2f} of the least work"
            print(line, flush=True)
    form = "jax" if given.engine == "jax" else "compiled"
    kind = f"{form}-cost-of-exact" if given.compile or form == "jax" else "cost-of-exact"
    machine = cpu_name() if given.device == "cpu" else probe().devices[0].name
    found = {"models": models, "device": "cpu" if given.device == "cpu" else "cuda"}
    publish(kind, found, machine=machine, is_kept=not given.no_keep)


if __name__ == "__main__":
    main()
