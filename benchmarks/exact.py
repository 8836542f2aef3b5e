"""What train.exact costs: seconds a step and peak memory, beside the ordinary mode, on 1, 2 and 4
ranks under ddp, fsdp and hsdp, for a GPT of 10M parameters.

Both modes train the same batches in the same ranks, step by step in turn, so that noise of the
machine meets both. Ordinary twice: in microbatches and threads of the exact mode
("same slots"), which
leaves what exactness itself costs; and as a user has it, whole shares at once ("as is"). Memory is
of runs by themselves. Prints a table; writes benchmarks/results/exact-<machine>.json unless
--no-keep. Run: python -m benchmarks.exact [--layouts single,ddp:2,ddp:4,fsdp:2,fsdp:4,hsdp:4]
[--device cuda:0] [--dtype f32] [--no-keep]     (--device: all ranks on this one GPU, Gloo between
them)
"""

import argparse
import resource
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import UNASKED
from benchmarks.page import publish
from samecurve.core.config.document import Document
from samecurve.core.config.loading import load
from samecurve.core.planning.machine import Machine
from samecurve.core.planning.planner import plan
from samecurve.data.feed import Feed
from samecurve.experiments.layouts import parse_layout
from samecurve.launch.pool import pool
from samecurve.probe import cpu_name, probe
from samecurve.tasks import Tasks, open_task
from samecurve.torch_engine.engine import TorchEngine
from samecurve.torch_engine.process_group import Comm
from samecurve.torch_engine.strategies.exact import set_deterministic

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
    "same slots": {"batch": {"samples": BATCH, "per_device": MICRO_BATCH}},
    "as is": {"batch": {"samples": BATCH}},
}


def values_of(
    home: Path, mode: str, world: int, dtype: str, strategy: str = "auto"
) -> dict[str, Any]:
    changed = MODES[mode]
    return {
        "model": MODEL,
        "data": {"source": str(home / "text.txt"), "eval_samples": 0},
        "batch": changed["batch"],
        "devices": {"use": f"cpu:{world}", "threads": 1, "strategy": strategy},
        "train": {"steps": WARM + STEPS, "precision": dtype, **changed.get("train", {})},
    }


def race(
    index: int, group: dist.ProcessGroup, home: Path, modes: list[str], where: tuple[str, str, str]
) -> Mapping[str, Any]:
    """Train the modes in turn, step by step, on one rank. where: precision, device, strategy.

    Returns seconds of each step by mode, and peak bytes.
    """
    dtype, device, strategy = where
    world, place = dist.get_world_size(group), torch.device(device)
    runners = {}
    for mode in modes:
        config = load(Document(values_of(home, mode, world, dtype, strategy)), Tasks()).config
        task: Any = open_task(config, str(home / "cache"))
        made = plan(
            config, Machine(devices=(), links=(), host_bytes=64 << 30, cores=4), task.facts()
        )
        engine = TorchEngine(
            task, made, config.optimizer, Comm(group if world > 1 else None), [place]
        )
        feed = Feed(made, made.layout.devices_of(index), task.train_data(), None, engine.stage)
        runners[mode] = (made, engine, iter(feed), feed, [engine.init()])
    seconds: dict[str, list[float]] = {mode: [] for mode in modes}
    losses: dict[str, float] = {}
    for number in range(WARM + STEPS):
        for mode, (made, engine, batches, _, state) in runners.items():
            set_deterministic(made.compute.exact)
            step, batch = next(batches)
            dist.barrier(group)
            began = time.perf_counter()
            state[0], stats = engine.step(state[0], batch, made.lr_at(step), UNASKED)
            losses[mode] = stats.read().loss
            if number >= WARM:
                seconds[mode].append(time.perf_counter() - began)
    for _, engine, _, feed, _ in runners.values():
        feed.close()
        engine.close()
    peak = (
        torch.cuda.max_memory_allocated()
        if place.type == "cuda"
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    return {
        "seconds": seconds,
        "losses": losses,
        "peak": peak,
        "params": sum(p.numel() for p in state[0].model.parameters()),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layouts", default="single,ddp:2,ddp:4,fsdp:2,fsdp:4,hsdp:4")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="f32")
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
            world, where = layout.num_devices, (given.dtype, given.device, layout.strategy)
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
