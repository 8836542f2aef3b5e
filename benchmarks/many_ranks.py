"""What grows with the number of ranks: the costs around a step, at more ranks than this machine has
cores. No rank trains here.

- dummy ranks meet as ranks of several hosts do (worker/meeting.py, launch/rank_agreement.py), read
  their plan and beat once: threads in processes of this machine;
- one rank of 1,024 is built for real over torch's fake process group, whose collectives do nothing,
  and takes a step.

Run: python -m benchmarks.many_ranks [--ranks 16,32,64,128,256] [--world 1024]
"""

import argparse
import json
import multiprocessing
import os
import resource
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import UNASKED
from samecurve.core.config.document import Document
from samecurve.core.config.loading import LoadedConfig, load
from samecurve.core.planning.machine import Machine
from samecurve.core.planning.plan import Plan
from samecurve.core.planning.planner import plan
from samecurve.core.protocols import Rank
from samecurve.data.feed import Feed
from samecurve.launch.rank_agreement import check_ranks_agree, report_config
from samecurve.observe.heartbeat import Heartbeat
from samecurve.run.directory.run_directory import Run
from samecurve.tasks import Tasks, open_task
from samecurve.worker.meeting import Meeting

THREADS = 16  # dummy ranks of one process
_DECISION = "benchmark/decision"


def loaded(home: Path, world: int, strategy: str = "ddp") -> LoadedConfig:
    values = {
        "model": {
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 2,
            "intermediate_size": 64,
            "max_seq_len": 64,
        },
        "data": {"source": str(home / "text.txt")},
        "batch": {"samples": 2 * world},
        "train": {"steps": 10},
        "devices": {"use": "cpu:256", "strategy": strategy},
    }
    return load(Document(values), Tasks())


def make_plan(home: Path, world: int, strategy: str = "ddp") -> tuple[LoadedConfig, Plan, Any]:
    """A plan for hosts of 256 CPU ranks at most."""
    config = loaded(home, world, strategy)
    hosts = max(1, world // 256)
    config = LoadedConfig(
        config.config.with_values(devices={"use": f"cpu:{world // hosts}"}), "ranks", {}
    )
    machine = Machine(devices=(), links=(), host_bytes=1 << 50, cores=world // hosts, hosts=hosts)
    task = open_task(config.config, str(home / "cache"))
    return config, plan(config.config, machine, task.facts()), task


def be_ranks(home: Path, first: int, world: int, port: int, times: Any) -> None:
    """Be THREADS ranks at most, each in a thread. times: a queue of (rank, seconds by part)"""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    config, _, _ = make_plan(home, world)
    run = Run(home / "run")

    def be(index: int) -> None:
        began = time.perf_counter()
        rank = Rank(index, index % 8, world, max(1, world // 8))
        meeting = Meeting(rank)
        store = meeting.join()
        met = time.perf_counter()
        if index == 0:
            check_ranks_agree(store, rank, config)
        else:
            report_config(store, rank, lambda: config, _DECISION)
        agreed = time.perf_counter()
        run.read_plan()
        read = time.perf_counter()
        Heartbeat(run.logs / f"heartbeat-{index}")(0, "step")
        times.put((index, {"meet": met - began, "agree": agreed - met, "read": read - agreed}))
        store.add("benchmark/done", 1)
        while index == 0 and store.add("benchmark/done", 0) < world:  # it serves the store
            time.sleep(0.05)

    ranks = range(first, min(first + THREADS, world))
    threads = [threading.Thread(target=be, args=(index,)) for index in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def measure_start(home: Path, world: int) -> Mapping[str, Any]:
    """Seconds of the slowest rank, by part, and the size of the plan's file."""
    config, made, _ = make_plan(home, world)
    run = Run(home / "run")
    for directory in (run.home, run.logs, run.checkpoints):
        directory.mkdir(parents=True, exist_ok=True)
    run.write(config.config, made)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    times = context.Queue()
    processes = [
        context.Process(target=be_ranks, args=(home, first, world, port, times))
        for first in range(0, world, THREADS)
    ]
    began = time.perf_counter()
    for process in processes:
        process.start()
    found = dict(times.get(timeout=300) for _ in range(world))
    whole = time.perf_counter() - began
    for process in processes:
        process.join()
    parts = {part: max(one[part] for one in found.values()) for part in ("meet", "agree", "read")}
    cpu = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "ranks": world,
        **{f"{part}_seconds": round(seconds, 3) for part, seconds in parts.items()},
        "whole_seconds": round(whole, 3),
        "children_cpu_seconds": round(cpu.ru_utime + cpu.ru_stime, 2),
        "plan_bytes": run.plan.stat().st_size,
    }


def measure_one_of(home: Path, world: int, strategy: str) -> Mapping[str, Any]:
    """Build one rank of so many for real, over a group whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from samecurve.torch_engine.engine import TorchEngine

    ddp: Any = import_module("samecurve.torch_engine.strategies.ddp")
    from samecurve.torch_engine.process_group import Comm

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    ddp.sum_bucket = unsummed  # the fake group's future has no value
    began = time.perf_counter()
    config, made, task = make_plan(home, world, strategy)
    planned = time.perf_counter()
    device = torch.device("cpu")
    engine = TorchEngine(task, made, config.config.optimizer, Comm(dist.group.WORLD), [device])
    feed = Feed(made, made.layout.devices_of(0), task.train_data(), None, engine.stage)
    state = engine.init()
    built = time.perf_counter()
    steps = []
    for step, batch in feed:
        begun = time.perf_counter()
        state, metrics = engine.step(state, batch, made.lr_at(step), UNASKED)
        metrics.read()
        steps.append(time.perf_counter() - begun)
    feed.close()
    engine.close()
    dist.destroy_process_group()
    return {
        "strategy": strategy,
        "ranks": world,
        "plan_seconds": round(planned - began, 3),
        "build_seconds": round(built - planned, 3),
        "step_milliseconds": round(1e3 * statistics.median(steps), 2),
        "memory_mebibytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }


def unsummed(_group: Any, bucket: Any) -> Any:
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def in_child(function: Any, *arguments: Any) -> Mapping[str, Any]:
    """What a function returns in a process of its own: its memory is its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        result: Mapping[str, Any] = pool.submit(function, *arguments).result()
    return result


def numbers(text: str) -> Sequence[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=numbers, default=[16, 32, 64, 128, 256])
    parser.add_argument("--world", type=numbers, default=[2, 64, 1024])
    parser.add_argument("--to", type=Path, help="a JSON file for the figures")
    given = parser.parse_args()
    result: dict[str, Any] = {"start": [], "one_of_many": []}
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        (home / "text.txt").write_text("".join(f"{i} squared is {i * i}\n" for i in range(40_000)))
        for world in given.ranks:
            row = in_child(measure_start, home, world)
            print("start", *(f"{key} {value}" for key, value in row.items()), sep="  ", flush=True)
            result["start"].append(row)
        for strategy in ("ddp", "fsdp", "hsdp"):
            for world in given.world:
                if strategy == "hsdp" and world < 4:
                    continue
                row = in_child(measure_one_of, home, world, strategy)
                print("one of many", *(f"{k} {v}" for k, v in row.items()), sep="  ", flush=True)
                result["one_of_many"].append(row)
    if given.to:
        given.to.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
