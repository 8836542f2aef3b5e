"""Tokens per second of a Llama of the transformers library: ours, a plain loop, HF Trainer and
Accelerate, in turn.

On a CPU: 10M parameters on two ranks of one thread each, all in the same two processes, over the
same group (gloo), on the same random tokens, clipping and optimizer; each reads its loss and norm
every step. Writes benchmarks/results/hf-<cpu>.json. Where there is a GPU, benchmarks/hf_gpu.py.

Run: python -m benchmarks.hf [--turns 5] [--steps 12] [--cpu] (the extra `bench`).
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import alternate, config_of, installed, paired, trained, write
from samecurve.core.planning.planner import plan
from samecurve.launch.pool import pool
from samecurve.probe import probe
from samecurve.tasks import open_task
from samecurve.tasks.huggingface.data.rows import RandomRows
from samecurve.torch_engine.engine import TorchEngine
from samecurve.torch_engine.process_group import Comm

WORLD, EACH, CLIP, LR, WARM = 2, 4, 1.0, 3e-4, 3
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


class Clock:
    """Seconds a step, the first few left out.

    late: a step is told of when the next one has been computed, and the last one at once after the
    one before.
    """

    def __init__(self, *, late: bool = False) -> None:
        self._ends: list[float] = []
        self._late = late

    def mark(self, event: Any = None) -> None:
        if event is None or event.kind == "step":
            self._ends.append(time.perf_counter())

    def seconds(self) -> float:
        ends = self._ends[:-1] if self._late else self._ends
        return (ends[-1] - ends[WARM - 1]) / (len(ends) - WARM)


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
    model, clock = DistributedDataParallel(inner, gradient_as_bucket_view=True), Clock()
    for batch in batches(rank, steps):
        loss = model(**batch).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        float(loss.item() + norm.item())
        clock.mark()
    return clock.seconds()


def ours(rank: int, steps: int, home: Path) -> float:
    config = config_of(
        {
            "task": "huggingface",
            "model": {"architecture": "llama", **FIELDS},
            "data": {"source": "random", "seq_len": LENGTH, "samples": SAMPLES, "validation": 0},
            "batch": {"samples": WORLD * EACH},
            "optimizer": {"lr": LR, "clip": CLIP},
            "train": {"steps": steps},
            "devices": {"use": f"cpu:{WORLD}", "strategy": "ddp", "threads": 1},
        }
    )
    task: Any = open_task(config, str(home / "cache"))
    made = plan(config, probe(), task.facts())
    comm = Comm(torch.distributed.group.WORLD)
    engine = TorchEngine(task, made, config.optimizer, comm, [torch.device("cpu")])
    clock = Clock(late=True)
    trained(engine, task, made, home / f"run-{rank}", clock.mark, rank=rank)
    return clock.seconds()


def accelerate(rank: int, steps: int, _home: Path) -> float:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == WORLD
    model, optimizer = accelerator.prepare(*parts())
    clock = Clock()
    for batch in batches(rank, steps):
        loss = model(**batch).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        float(loss.item() + float(norm))
        clock.mark()
    return clock.seconds()


def hf_trainer(rank: int, steps: int, home: Path) -> float:
    from transformers.trainer import Trainer
    from transformers.trainer_callback import PrinterCallback, TrainerCallback
    from transformers.training_args import TrainingArguments

    clock = Clock()

    class Ends(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            del args, state, control
            if "grad_norm" in logs:
                clock.mark()

    class Loader(list[Any]):
        batch_size = EACH

        def __iter__(self) -> Iterator[Any]:
            return batches(rank, steps)

        def __len__(self) -> int:
            return steps

    class OnOurBatches(Trainer):
        def get_train_dataloader(self) -> Any:
            return Loader()

    arguments = TrainingArguments(
        str(home),
        max_steps=steps,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        max_grad_norm=CLIP,
        learning_rate=LR,
        lr_scheduler_type="constant",
        save_strategy="no",
        use_cpu=True,
        optim="adamw_torch_fused",
        per_device_train_batch_size=EACH,
        ddp_backend="gloo",
    )
    assert arguments.world_size == WORLD
    rows: Any = RandomRows(SAMPLES, LENGTH, VOCAB)
    run = OnOurBatches(
        model=model_of_library(), args=arguments, train_dataset=rows, callbacks=[Ends()]
    )
    run.remove_callback(PrinterCallback)
    run.train()
    return clock.seconds()


SIDES: dict[str, Callable[[int, int, Path], float]] = {
    "plain ddp": plain,
    "samecurve": ours,
    "accelerate": accelerate,
    "hf trainer": hf_trainer,
}


def one(rank: int, _group: Any, name: str, steps: int, home: str) -> float:
    """One side's run, in one of the two processes."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(WORLD),
        LOCAL_WORLD_SIZE=str(WORLD),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(PORT),
        GROUP_RANK="0",
        ACCELERATE_USE_CPU="true",
        TORCHELASTIC_RUN_ID="benchmark",
        TORCHELASTIC_RESTART_COUNT="0",
        TORCHELASTIC_MAX_RESTARTS="0",
    )
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.distributed.barrier()
    return SIDES[name](rank, steps, Path(home))


def on_cpus(arguments: argparse.Namespace) -> None:
    if len(installed(NEEDS)) < len(NEEDS):
        sys.exit(f"needs {', '.join(NEEDS)}: the extra `bench`")
    with (
        tempfile.TemporaryDirectory() as scratch,
        pool(WORLD, Path(scratch) / "ranks.log") as ranks,
    ):
        number = iter(range(10_000))

        def side(name: str) -> Callable[[], float]:
            def once() -> float:
                home = Path(scratch, str(next(number)))
                home.mkdir()
                return float(max(ranks.run(WORLD, one, name, arguments.steps, str(home))))

            return once

        try:
            seconds = alternate({name: side(name) for name in SIDES}, arguments.turns)
        except Exception:
            sys.stderr.write(Path(scratch, "ranks.log").read_text()[-2000:])
            raise
    tokens = WORLD * EACH * LENGTH
    ratio = {
        name: paired(seconds["hf trainer"], times, lambda a, b: a / b)
        for name, times in seconds.items()
    }
    print(f"{'trainer':<14}{'tokens/s':>10}{'of HF Trainer':>15}   each turn's")
    for name, times in seconds.items():
        each = [b / a for a, b in zip(times, seconds["hf trainer"], strict=True)]
        rate = tokens / statistics.median(times)
        print(f"{name:<14}{rate:10.0f}{ratio[name]:15.3f}   {', '.join(f'{r:.3f}' for r in each)}")
    if not arguments.dry:
        result = {
            "seconds": seconds,
            "tokens_per_step": tokens,
            "of_hf_trainer": ratio,
            "parameters": sum(p.numel() for p in model_of_library().parameters()),
            "world": WORLD,
            "steps": arguments.steps - WARM,
        }
        print(write("hf", result))


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
