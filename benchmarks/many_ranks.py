"""What grows with the number of ranks: the costs around a step, at more ranks than this machine has
cores. No rank trains here.

- dummy ranks meet as ranks of several hosts do (worker/meeting.py, launch/rank_agreement.py), read
  their plan and beat once: threads in processes of this machine;
- one rank of 1,024 is built for real over torch's fake process group, whose collectives do nothing,
  and takes steps;
- what the first host's launcher and its hang watch read again and again: the state of torch's
  rendezvous, and the files of all ranks.

Run: python -m benchmarks.many_ranks [--ranks 16,64] [--world 2,64,1024] [--write]
"""

import argparse
import json
import multiprocessing
import os
import pickle
import resource
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from benchmarks.common import UNASKED, write
from samecurve.core.config.document import Document
from samecurve.core.config.loading import LoadedConfig, load_document
from samecurve.core.planning.machine import Machine
from samecurve.core.planning.plan import Plan
from samecurve.core.planning.planner import plan
from samecurve.core.protocols import Rank
from samecurve.data.feed import Feed
from samecurve.launch.rank_agreement import check_ranks_agree, report_config
from samecurve.observe import Heartbeat
from samecurve.run.directory import Run
from samecurve.tasks import Tasks, open_task
from samecurve.torch_engine.strategies.sharded.order import GatherOrder
from samecurve.watch import live_ranks
from samecurve.worker.meeting import Meeting

REPEATS = 20
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
    return load_document(Document(values), Tasks())


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
    from samecurve.torch_engine.process_group import Comm

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    GatherOrder._rows_of_all = as_this_rank  # type: ignore[method-assign, assignment]  # noqa: SLF001
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


def measure_hosts(_home: Path, hosts: int) -> Mapping[str, Any]:
    """One sign of life of one host: read the state of all hosts, and write it again."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    backend = C10dRendezvousBackend(store, "hosts")
    state = _RendezvousState()
    for index in range(hosts):
        host = _NodeDesc(f"10.0.{index // 256}.{index % 256}", 1000 + index, 0)
        state.participants[host] = index
        state.last_heartbeats[host] = datetime.now(UTC)
    backend.set_state(pickle.dumps(state))
    seconds, token = [], b""
    for _ in range(REPEATS):
        began = time.perf_counter()
        read = backend.get_state()
        assert read
        bits, token = read
        backend.set_state(pickle.dumps(pickle.loads(bits)), token)
        seconds.append(time.perf_counter() - began)
    return {
        "hosts": hosts,
        "state_bytes": len(token),
        "sign_of_life_milliseconds": round(1e3 * statistics.median(seconds), 2),
    }


def measure_watch(home: Path, world: int) -> Mapping[str, Any]:
    """One look of the hang watch at which ranks live, where they are on hosts of eight."""
    logs = home / f"watch-{world}"
    logs.mkdir()
    for index in range(world):
        values = {"pid": os.getpid(), "since": 0.0, "host": f"node{index // 8}"}
        (logs / f"process-{index}.json").write_text(json.dumps(values))
    seconds, foreign = [], set[str]()
    for _ in range(REPEATS):
        began = time.perf_counter()
        live_ranks(logs, foreign)
        seconds.append(time.perf_counter() - began)
    return {"ranks": world, "look_milliseconds": round(1e3 * statistics.median(seconds), 2)}


def as_this_rank(_order: GatherOrder, own: torch.Tensor) -> torch.Tensor:
    """All ranks gather and sum as this one does: the fake group has no answer of theirs."""
    return own[None]


def in_child(function: Any, *arguments: Any) -> Mapping[str, Any]:
    """What a function returns in a process of its own: its memory is its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        result: Mapping[str, Any] = pool.submit(function, *arguments).result()
    return result


def numbers(text: str) -> Sequence[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=numbers, default=[16, 64])
    parser.add_argument("--world", type=numbers, default=[2, 64, 1024])
    parser.add_argument("--write", action="store_true", help="into benchmarks/results/")
    options = parser.parse_args()
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        (home / "text.txt").write_text("".join(f"{i} squared is {i * i}\n" for i in range(40_000)))

        def measure(name: str, function: Any, *arguments: Any) -> None:
            row = {**in_child(function, home, *arguments), "load": round(os.getloadavg()[0], 1)}
            print(name, *(f"{key} {value}" for key, value in row.items()), sep="  ", flush=True)
            result.setdefault(name, []).append(row)

        for world in options.world:
            measure("watch", measure_watch, world)
        for hosts in (2, 128, 1250):
            measure("hosts", measure_hosts, hosts)
        for strategy in ("ddp", "fsdp", "hsdp"):
            for world in options.world:
                if strategy != "hsdp" or world >= 4:
                    measure("one of many", measure_one_of, world, strategy)
        for world in options.ranks:
            measure("start", measure_start, world)
    if options.write:
        print(f"written: {write('many-ranks', result)}")


if __name__ == "__main__":
    main()
