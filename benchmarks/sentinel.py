"""What a check of train.sentinel costs beside a step: a GPT of 10M parameters with AdamW in f32, in
microbatches of 2, CPU ranks of one thread each.

Steps with and without a check take turns in the same ranks. Prints medians, of the clock and of the
processor's time of one rank, which a busy machine disturbs less. Writes
benchmarks/results/sentinel-<machine>.json unless --no-keep. Run: python -m benchmarks.sentinel
[--layouts single,ddp:2,fsdp:2] [--steps 12] [--no-keep]
"""

import argparse
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import UNASKED
from benchmarks.exact import STEPS, WARM, values_of
from benchmarks.page import publish
from samecurve.core.config.document import Document
from samecurve.core.config.loading import load_document
from samecurve.core.planning.machine import Machine
from samecurve.core.planning.planner import plan
from samecurve.data.feed import Feed
from samecurve.experiments.layouts import parse_layout
from samecurve.launch.pool import pool
from samecurve.probe import cpu_name
from samecurve.tasks import Tasks, open_task
from samecurve.torch_engine.engine import TorchEngine
from samecurve.torch_engine.process_group import Comm

MACHINE = Machine(devices=(), links=(), host_bytes=64 << 30, cores=4)


def measure(
    index: int, group: dist.ProcessGroup, home: Path, strategy: str, steps: int
) -> Mapping[str, Any]:
    """Seconds of steps with a check and without, on one rank: pairs of the clock's and the
    processor's.
    """
    world = dist.get_world_size(group)
    values = values_of(home, "same slots", world, "f32", strategy)
    values["train"] |= {"sentinel": 2, "steps": 2 * (WARM + steps)}
    config = load_document(Document(values), Tasks()).config
    task: Any = open_task(config, str(home / "cache"))
    made = plan(config, MACHINE, task.facts())
    comm = Comm(group if world > 1 else None)
    engine = TorchEngine(task, made, config.optimizer, comm, [torch.device("cpu")])
    feed = Feed(made, made.layout.devices_of(index), task.train_data(), None, engine.stage)
    state = engine.init()
    seconds: dict[str, list[tuple[float, float]]] = {"checked": [], "plain": []}
    for step, batch in feed:
        dist.barrier(group)
        began, computed = time.perf_counter(), time.process_time()
        state, metrics = engine.step(state, batch, made.lr_at(step), UNASKED)
        metrics.read()
        is_checked = bool(engine.notes)
        engine.notes.clear()
        if step >= 2 * WARM:
            took = time.perf_counter() - began, time.process_time() - computed
            seconds["checked" if is_checked else "plain"].append(took)
    feed.close()
    engine.close()
    return {"seconds": seconds, "rounds": made.batch.accumulation_steps}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layouts", default="single,ddp:2,fsdp:2")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--no-keep", action="store_true")
    given = parser.parse_args()
    layouts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        (home / "text.txt").write_text("".join(f"{i} squared is {i * i}\n" for i in range(40_000)))
        for name in given.layouts.split(","):
            layout = parse_layout(name)
            with pool(layout.num_devices, home / "ranks.log", 1800) as ranks:
                arguments = home, layout.strategy, given.steps
                layouts[name] = ranks.run(layout.num_devices, measure, *arguments)[0]
    publish("sentinel", {"layouts": layouts}, machine=cpu_name(), is_kept=not given.no_keep)


if __name__ == "__main__":
    main()
