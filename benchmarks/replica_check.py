"""What a comparison of train.check_replicas costs beside a step: a GPT of 10M parameters with AdamW
in f32 under ddp, CPU ranks of one thread each.

Steps and comparisons take turns in the same ranks. Prints medians. Run: python -m
benchmarks.replica_check [--worlds 2,4]
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import UNASKED
from benchmarks.exact import STEPS, WARM, values_of
from samecurve.core.config.document import Document
from samecurve.core.config.loading import load_document
from samecurve.core.planning.machine import Machine
from samecurve.core.planning.planner import plan
from samecurve.data.feed import Feed
from samecurve.launch.pool import pool
from samecurve.tasks import Tasks, open_task
from samecurve.torch_engine.engine import TorchEngine
from samecurve.torch_engine.process_group import Comm

MACHINE = Machine(devices=(), links=(), host_bytes=64 << 30, cores=4)


def measure(index: int, group: dist.ProcessGroup, home: Path) -> Mapping[str, Any]:
    """Seconds of steps and of comparisons on one rank."""
    values = values_of(home, "as is", dist.get_world_size(group), "f32")
    values["train"] = {**values["train"], "check_replicas": 10**6}  # of a run that asks for it
    config = load_document(Document(values), Tasks()).config
    task: Any = open_task(config, str(home / "cache"))
    made = plan(config, MACHINE, task.facts())
    engine = TorchEngine(task, made, config.optimizer, Comm(group), [torch.device("cpu")])
    feed = Feed(made, made.layout.devices_of(index), task.train_data(), None, engine.stage)
    check: Any = engine.features["check_replicas"]
    state, arrays = engine.init(), 0
    steps: list[float] = []
    comparisons: list[float] = []
    for step, batch in feed:
        dist.barrier(group)
        began = time.perf_counter()
        state, metrics = engine.step(state, batch, made.lr_at(step), UNASKED)
        metrics.read()
        trained = time.perf_counter()
        arrays = check.compare(state, step + 1)
        compared = time.perf_counter()
        if step >= WARM:
            steps.append(trained - began)
            comparisons.append(compared - trained)
    feed.close()
    engine.close()
    params = sum(parameter.numel() for parameter in state.parameters)
    return {"steps": steps, "comparisons": comparisons, "arrays": arrays, "params": params}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--worlds", default="2,4")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        (home / "text.txt").write_text("".join(f"{i} squared is {i * i}\n" for i in range(40_000)))
        for world in map(int, given.worlds.split(",")):
            with pool(world, home / "ranks.log", 1800) as ranks:
                found = ranks.run(world, measure, home)[0]
            step = statistics.median(found["steps"])
            comparison = statistics.median(found["comparisons"])
            share = comparison / (100 * step)
            print(
                f"ranks {world}  {found['params']:,} parameters, {found['arrays']} arrays  step"
                f" {step * 1e3:.0f} ms  comparison {comparison * 1e3:.0f} ms, every 100 steps"
                f" {share:.2%} (n = {STEPS})"
            )


if __name__ == "__main__":
    main()
