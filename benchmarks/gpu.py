"""Tokens a second, MFU and memory of a config on one GPU, beside others on the same model, batches
and optimizer, in turn.

    python -m benchmarks.gpu                              # models/small.yaml (124M)
    python -m benchmarks.gpu --config models/large.yaml   # 1B; 64 samples a step
    python -m benchmarks.gpu --micro 8                    # where a side runs out of memory
    python -m benchmarks.gpu --device cpu --tiny --turns 1 --warm 2 --steps 3
                                                          # the same paths without a GPU, in about
                                                          # two minutes: says nothing of speed

Sides: samecurve (its own engine and loop, blocks compiled); plain: a loop as nanoGPT's, the whole
model compiled; the Hugging Face Trainer and Accelerate, compiled too (benchmarks/sides.py). All in
bf16 autocast with weights in f32, clipped at the same norm, by fused AdamW, in the same microbatch
and rounds. Each turn of a side is a process of its own (benchmarks/gpu_turns.py): a side that fails
is left out with its reason. Right after its first timed steps each side is profiled for three more,
which names its attention kernel. MFU is given by two formulas (benchmarks/gpu_result.py), over the
dense peak of the data sheet, and over the fastest of some large bf16 products measured in the same
run. Before the sides, ten small configs are trained for some steps, and their losses are compared
with golden ones (benchmarks/golden.py); --no-golden leaves this out. Writes
benchmarks/results/gpu-<machine>-<config>.json after every turn of a side; on a CPU only where --out
says. Exit 0: at least one side was measured, and no loss is further from its golden one than
allowed; 1: otherwise; 130, 143: stopped by a signal, with the results so far.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.golden import compare_all, print_rows
from benchmarks.golden_cases import CASES
from benchmarks.gpu_main import Add, Race, check, parser_of, race
from benchmarks.gpu_profile import PROFILED
from benchmarks.gpu_result import version
from benchmarks.sides import SIDES, Setting
from samecurve.core.config.document import read_document
from samecurve.core.config.loading import load_document
from samecurve.core.config.sections import Config
from samecurve.core.planning.planner import plan
from samecurve.core.system.installation import install_command
from samecurve.probe import probe
from samecurve.tasks import Tasks, open_task

_VOCABULARY = {
    "small": 50_304,
    "large": 32_000,
}  # GPT-2's, padded, which makes it the 124M model; the config's own. The tokens are drawn
_SAMPLES = {
    "large": 64
}  # of a step: a quarter of the config's, so that all sides fit in ten minutes
_GOLDEN_SECONDS = 90  # no config's losses are compared after these
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


def config_of(arguments: argparse.Namespace, home: Path) -> Config:
    document, name = read_document(arguments.config), arguments.config.stem
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
        "train.steps": arguments.warm + arguments.steps + PROFILED,
        "train.precision": "bf16",
        "train.compile": True,
        "train.exact": False,  # as the other sides; benchmarks/exact.py has the price
        "devices.use": "0" if arguments.device == "cuda" else "cpu",
        "devices.strategy": "single",
        "schedule.warmup": 1,
        **(_TINY if arguments.tiny else {}),
    }
    for key, value in values.items():
        document.set(key, value, "benchmarks/gpu.py")
    return load_document(document, Tasks(), name).config


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


def compare_losses(device: str, add: Add) -> None:
    """Print how far this machine's losses are from the golden ones, and add it to the answer."""
    rows = []
    for row in print_rows(compare_all(device, tuple(CASES), _GOLDEN_SECONDS)):
        rows.append(asdict(row))
        add({"golden": rows})


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, SIDES)
    parser.add_argument(
        "--config", type=Path, default=Path(__file__).parents[1] / "models/small.yaml"
    )
    parser.add_argument("--batch", type=int, help="samples of a step")
    parser.add_argument(
        "--micro",
        type=int,
        help="samples at once at most, on every side; the plan's own if not given",
    )
    parser.add_argument("--no-golden", action="store_true", help="compare no losses")
    arguments = parser.parse_args(words)
    check(parser, arguments, SIDES)
    return arguments


def main(words: Sequence[str] | None = None) -> None:
    words = sys.argv[1:] if words is None else words
    arguments = parsed(words)
    wanted = arguments.sides.split(",")
    needs = {name: side for name, side in SIDES.items() if name in wanted and side.needs}
    race(
        Race(
            module="benchmarks.gpu",
            kind="gpu",
            case=arguments.config.stem,
            words=words,
            arguments=arguments,
            setting_of=partial(setting_of, arguments),
            runs={name: side.run for name, side in SIDES.items()},
            skipped={
                name: f"{side.needs} is not installed ({install_command(side.extra)})"
                for name, side in needs.items()
                if version(side.needs) is None
            },
            compare=None if arguments.no_golden else partial(compare_losses, arguments.device),
        )
    )


if __name__ == "__main__":
    main()
