"""What train.exact costs: seconds a step and peak memory, beside the ordinary mode, on 1, 2 and 4
ranks under ddp, fsdp and hsdp, for a GPT of 10M parameters.

Both modes train the same batches in the same ranks, step by step in turn, so that noise of the
machine meets both. Ordinary twice: in microbatches and threads of the exact mode
("same slots"), which
leaves what exactness itself costs; and as a user has it, whole shares at once ("as is"). Memory is
of runs by themselves. Prints a table; writes benchmarks/results/exact-<machine>.json unless
--no-keep. Run: python -m benchmarks.exact [--layouts single,ddp:2,ddp:4,fsdp:2,fsdp:4,hsdp:4]
[--device cuda:0] [--dtype f32] [--gather auto] [--no-keep]     (--device: all ranks on this one
GPU, Gloo between them)
"""

import argparse
import resource
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import UNASKED
from benchmarks.page import publish
from samecurve.core.config.document import Document
from samecurve.core.config.loading import load_document
from samecurve.core.planning.machine import Machine
from samecurve.core.planning.planner import plan
from samecurve.data.feed import Feed
from samecurve.experiments.layouts import parse_layout
from samecurve.launch.pool import pool
from samecurve.probe import cpu_name, probe
from samecurve.tasks import Tasks, open_task
from samecurve.torch_engine.engine import TorchEngine
from samecurve.torch_engine.precision import set_deterministic
from samecurve.torch_engine.process_group import Comm
from samecurve.worker.join import join_warm

BATCH, MICRO_BATCH, WARM, STEPS = 16, 2, 2, 12
MODEL = {
    "hidden_size": 320,
    "num_layers": 8,
    "num_heads": 5,
    "kv_heads": 5,
    "intermediate_size": 864,
    "max_seq_len": 128,
    "tie_embeddings": True,
}
MODES: dict[str, dict[str, Any]] = {  # changes of each mode to the config
    "exact": {"train": {"exact": True}, "batch": {"samples": BATCH, "per_device": MICRO_BATCH}},
    "same slots": {
        "train": {"exact": False},
        "batch": {"samples": BATCH, "per_device": MICRO_BATCH},
    },
    "as is": {"train": {"exact": False}, "batch": {"samples": BATCH}},
}


class Runner:
    """A config that is trained step by step, in this process."""

    def __init__(
        self,
        values: Mapping[str, Any],
        home: Path,
        *,
        index: int = 0,
        comm: Comm | None = None,
        place: str = "cpu",
        cores: int = 4,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """values: of the config. index: of this process's device. comm: None: it is alone.
        cores: of the machine that is planned for
        """
        self._clock = clock
        config = load_document(Document(dict(values)), Tasks()).config
        self.task: Any = open_task(config, str(home / "cache"))
        self.facts = self.task.facts()
        machine = Machine(devices=(), links=(), host_bytes=64 << 30, cores=cores)
        self.plan = plan(config, machine, self.facts)
        self._engine: Any
        if config.engine == "jax":
            session = join_warm(self.plan, index, None, more=False)
            self._engine = session.make_engine(self.task, config.optimizer)
        else:
            self._engine = TorchEngine(
                self.task, self.plan, config.optimizer, comm or Comm(None), [torch.device(place)]
            )
        devices = self.plan.layout.devices_of(index)
        self._feed = Feed(self.plan, devices, self.task.train_data(), None, self._engine.stage)
        self._batches = iter(self._feed)
        self.state = self._engine.init()
        self.loss = 0.0  # of the last step

    def step(self, before: Callable[[], object] = lambda: None) -> float:
        """Train one step, once `before` has been called. Returns its seconds."""
        step, batch = next(self._batches)
        before()
        began = self._clock()
        self.state, metrics = self._engine.step(
            self.state, batch, self.plan.schedule.at(step), UNASKED
        )
        self.loss = metrics.read().loss
        return self._clock() - began

    def close(self) -> None:
        self._feed.close()
        self._engine.close()


def values_of(
    home: Path, mode: str, world: int, dtype: str, strategy: str = "auto", *, gather: str = "auto"
) -> dict[str, Any]:
    changed = MODES[mode]
    return {
        "model": MODEL,
        "data": {"source": str(home / "text.txt"), "eval_samples": 0},
        "batch": changed["batch"],
        "devices": {"use": f"cpu:{world}", "threads": 1, "strategy": strategy, "gather": gather},
        "train": {"steps": WARM + STEPS, "precision": dtype, **changed.get("train", {})},
    }


def race(
    index: int,
    group: dist.ProcessGroup,
    home: Path,
    modes: list[str],
    where: tuple[str, str, str, str],
) -> Mapping[str, Any]:
    """Train the modes in turn, step by step, on one rank.

    where: precision, device, strategy, devices.gather

    Returns seconds of each step by mode, and peak bytes.
    """
    dtype, device, strategy, gather = where
    world, place = dist.get_world_size(group), torch.device(device)
    runners = {
        mode: Runner(
            values_of(home, mode, world, dtype, strategy, gather=gather),
            home,
            index=index,
            comm=Comm(group if world > 1 else None),
            place=device,
        )
        for mode in modes
    }
    seconds: dict[str, list[float]] = {mode: [] for mode in modes}
    for number in range(WARM + STEPS):
        for mode, runner in runners.items():
            set_deterministic(runner.plan.same_bits, place)
            took = runner.step(before=partial(dist.barrier, group))
            if number >= WARM:
                seconds[mode].append(took)
    for runner in runners.values():
        runner.close()
    peak = (
        torch.cuda.max_memory_allocated()
        if place.type == "cuda"
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    return {
        "seconds": seconds,
        "losses": {mode: runner.loss for mode, runner in runners.items()},
        "peak": peak,
        "params": runners[modes[0]].facts.params,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layouts", default="single,ddp:2,ddp:4,fsdp:2,fsdp:4,hsdp:4")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="f32")
    parser.add_argument("--gather", default="auto", help="devices.gather of fsdp and hsdp")
    parser.add_argument("--no-keep", action="store_true")
    given = parser.parse_args()
    machine = cpu_name() if given.device == "cpu" else probe().devices[0].name
    result: dict[str, Any] = {
        "device": given.device,
        "dtype": given.dtype,
        "batch": BATCH,
        "slot": MICRO_BATCH,
        "worlds": {},
    }
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        (home / "text.txt").write_text("".join(f"{i} squared is {i * i}\n" for i in range(40_000)))
        for layout in map(parse_layout, given.layouts.split(",")):
            world = layout.num_devices
            where = (given.dtype, given.device, layout.strategy, given.gather)
            with pool(world, home / "ranks.log", 1800) as ranks:
                raced = ranks.run(world, race, home, list(MODES), where)[0]
            peaks = {}
            for mode in MODES:
                with pool(world, home / "ranks.log", 1800) as ranks:
                    peaks[mode] = max(
                        one["peak"] for one in ranks.run(world, race, home, [mode], where)
                    )
            result["worlds"][str(layout)] = {
                "seconds": raced["seconds"],
                "peak_bytes": peaks,
                "params": raced["params"],
            }
    publish("exact", result, machine=machine, is_kept=not given.no_keep)


if __name__ == "__main__":
    main()
