"""Tokens per second of a Llama of the transformers library: ours, a plain loop, HF Trainer and
Accelerate, in turn.

On a CPU: 10M parameters on two ranks of one thread each, all in the same two processes, over the
same group (gloo), on the same random tokens, clipping and optimizer; each reads its loss and norm
every step. Writes benchmarks/results/hf-<cpu>.json. Where there is a GPU, benchmarks/hf_gpu.py.

Run: python -m benchmarks.hf [--turns 5] [--steps 12] [--cpu] (the extra `bench`).
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import installed
from benchmarks.page import publish
from benchmarks.trainer_side import Settings, train_by_trainer
from benchmarks.two_ranks import (
    CLIP,
    EACH,
    LR,
    WARM,
    WORLD,
    Clock,
    Side,
    race,
    ratios,
    time_loop,
    time_ours,
)
from samecurve_products.text.huggingface.data.token_rows import RandomRows

PORT = 29_410  # where the other trainers' ranks meet
LENGTH, VOCAB, SAMPLES = 128, 4096, 4096
FIELDS = {
    "vocab_size": VOCAB,
    "hidden_size": 288,
    "intermediate_size": 768,
    "num_hidden_layers": 9,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": True,
}
NEEDS = ("transformers", "accelerate")


def batches(rank: int, steps: int) -> Iterator[dict[str, torch.Tensor]]:
    rows = RandomRows(SAMPLES, LENGTH, VOCAB)
    order = np.random.default_rng(1).permutation(len(rows))
    for step in range(steps):
        first = (step * WORLD + rank) * EACH
        batch = rows[order[first : first + EACH]]
        yield {name: torch.from_numpy(batch[name]) for name in ("input_ids", "labels")}


def model_of_library() -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    auto: Any = AutoModelForCausalLM
    fields: dict[str, Any] = {**FIELDS, "use_cache": False}
    torch.manual_seed(0)
    return auto.from_config(LlamaConfig(**fields))


def parts() -> tuple[Any, torch.optim.Optimizer]:
    model = model_of_library()
    return model, torch.optim.AdamW(model.parameters(), lr=LR, fused=True)


def plain(rank: int, steps: int, _home: Path) -> float:
    inner, optimizer = parts()
    model = DistributedDataParallel(inner, gradient_as_bucket_view=True)
    return time_loop(
        batches(rank, steps),
        optimizer,
        loss_of=lambda batch: model(**batch).loss,
        backward=torch.autograd.backward,
        clip=lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP),
    )


def ours(rank: int, steps: int, home: Path) -> float:
    data = {"source": "random", "seq_len": LENGTH, "samples": SAMPLES, "validation": 0}
    model = {"architecture": "llama", **FIELDS}
    return time_ours(rank, home, steps, task="huggingface", model=model, data=data).seconds()


def accelerate(rank: int, steps: int, _home: Path) -> float:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == WORLD
    model, optimizer = accelerator.prepare(*parts())
    return time_loop(
        batches(rank, steps),
        optimizer,
        loss_of=lambda batch: model(**batch).loss,
        backward=accelerator.backward,
        clip=lambda: accelerator.clip_grad_norm_(model.parameters(), CLIP),
    )


def hf_trainer(rank: int, steps: int, home: Path) -> float:
    clock = Clock()
    train_by_trainer(
        model_of_library(),
        lambda: batches(rank, steps),
        lambda _step, _logs: clock.mark(),
        Settings(home=home, steps=steps, samples=EACH, lr=LR, clip=CLIP, world=WORLD),
        RandomRows(SAMPLES, LENGTH, VOCAB),
    )
    return clock.seconds()


SIDES: dict[str, Side] = {
    "plain ddp": plain,
    "samecurve": ours,
    "accelerate": accelerate,
    "hf trainer": hf_trainer,
}


def on_cpus(arguments: argparse.Namespace) -> None:
    if len(installed(NEEDS)) < len(NEEDS):
        sys.exit(f"needs {', '.join(NEEDS)}: the extra `bench`")
    seconds = race(
        "benchmarks.hf", list(SIDES), port=PORT, turns=arguments.turns, steps=arguments.steps
    )
    tokens = WORLD * EACH * LENGTH
    result = {
        "seconds": seconds,
        "tokens_per_step": tokens,
        "of_hf_trainer": ratios(seconds, "hf trainer"),
        "parameters": sum(p.numel() for p in model_of_library().parameters()),
        "world": WORLD,
        "steps": arguments.steps - WARM,
    }
    publish("hf", result, is_kept=not arguments.dry)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--cpu", action="store_true", help="the CPU form beside a GPU, too")
    parser.add_argument("--dry", action="store_true", help="write no result file")
    arguments, others = parser.parse_known_args()
    if torch.cuda.is_available() and not arguments.cpu:
        from benchmarks import hf_gpu

        hf_gpu.main(others)
    elif others:
        parser.error(f"without a GPU: unknown {' '.join(others)}")
    else:
        on_cpus(arguments)


if __name__ == "__main__":
    main()
