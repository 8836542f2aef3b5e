"""The ranks of one start on this machine: in this process for one device, else as processes that
die with it. Each way returns why it failed, or None.
"""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import Any

from samecurve.core.config.sections import Devices
from samecurve.core.protocols import Rank
from samecurve.diagnose.crash import explain
from samecurve.diagnose.notes import note_of, read_notes
from samecurve.errors import SamecurveError
from samecurve.launch.hang_watch import OFTEN, HangWatch, overseen
from samecurve.launch.script.placement import reserve
from samecurve.launch.supervisor import FAILED
from samecurve.probe.cpu import oom_kills, oom_kills_since
from samecurve.run.prepare import PreparedRun
from samecurve.worker.cluster_env import explicit
from samecurve.worker.main import main, work
from samecurve.worker.preflight import left_hanging

_TICK = 0.05  # seconds
_GRACE = 10.0  # seconds in which ranks leave by themselves after one has failed


@dataclass(frozen=True)
class Ends:
    """failed: exit codes of ranks that did not end well, negative for a signal, the first first.

    left: those that had ended with 0 by then.
    """

    failed: Mapping[int, int]
    left: Sequence[int] = ()


def in_place(prepared: PreparedRun, devices: Devices) -> SamecurveError | None:
    try:
        with overseen(_watch(prepared, devices), lambda error: left_hanging(prepared.run, error)):
            work(prepared.attempt, Rank(0, 0, 1))
        return None
    except Exception as error:
        with open(prepared.run.logs / "rank-0.log", "a") as log:
            traceback.print_exc(file=log)
        return explain([note_of(0, error)], {}, prepared.run.logs)


def _watch(prepared: PreparedRun, devices: Devices) -> HangWatch:
    return HangWatch(
        prepared.run.logs,
        prepared.run.processes,
        prepared.plan.world_size,
        0 if prepared.attempt.evaluate else devices.hang_floor,
    )


def direct(prepared: PreparedRun, devices: Devices) -> SamecurveError | None:
    """Processes of our own: the launcher needs no torch for it, whose import holds a start up by
    seconds. Their first one serves the rendezvous.
    """

    def run() -> Ends:
        world = prepared.plan.world_size
        with nullcontext() if devices.port else reserve() as held:
            port = held.getsockname()[1] if held else devices.port
            started = [
                subprocess.Popen(
                    [
                        sys.executable,
                        "-u",
                        "-m",
                        "samecurve.worker.main",
                        prepared.attempt.to_json(),
                    ],
                    env={**os.environ, **explicit(rank, world, rank, world, "127.0.0.1", port)},
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )  # a session of its own: Ctrl-C is the launcher's
                for rank in range(world)
            ]
            return _ends(started)

    return _waited(prepared, devices, run)


def _ends(started: Sequence["subprocess.Popen[bytes]"]) -> Ends:
    """Those that failed by themselves; the others are ended soon after the first."""
    failed: dict[int, int] = {}
    left: list[int] = []
    due: list[tuple[float, int]] = []
    sent = False
    while True:
        codes = [process.poll() for process in started]
        for rank, code in enumerate(codes):
            if code and not sent and rank not in failed:
                due = due or [(time.monotonic() + seconds, number) for seconds, number in FAILED]
                left = (
                    left if failed else [other for other, ended in enumerate(codes) if ended == 0]
                )
                failed[rank] = code
        if None not in codes:
            return Ends(failed, left)
        if due and time.monotonic() > due[0][0]:
            sent, number = True, due.pop(0)[1]
            for process in started:
                process.send_signal(number)
        time.sleep(_TICK)


def elastic(prepared: PreparedRun, devices: Devices) -> SamecurveError | None:
    """torch's elastic agent, in a thread, so that signals stay with us."""

    def run() -> Ends:
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=prepared.plan.world_size,
            run_id=prepared.attempt.name,
            rdzv_backend="c10d",
            rdzv_endpoint=f"localhost:{devices.port}",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(),
        )
        try:
            elastic_launch(config, sys.executable)(
                "-u", "-m", "samecurve.worker.main", prepared.attempt.to_json()
            )
            return Ends({})
        except ChildFailedError as error:
            return Ends({rank: failure.exitcode for rank, failure in error.failures.items()})

    return _waited(prepared, devices, run)


def spawn(prepared: PreparedRun, devices: Devices) -> SamecurveError | None:
    """torch.multiprocessing, in a thread, its ranks meeting at a store that this process serves."""

    def run() -> Ends:
        from torch._C._distributed_c10d import (
            TCPStore,  # public as torch.distributed.TCPStore, where type checkers don't see it
        )
        from torch.multiprocessing.spawn import (
            ProcessExitedException,
            ProcessRaisedException,
            start_processes,
        )

        logging.getLogger("torch.multiprocessing").setLevel(logging.CRITICAL)
        resource_tracker.ensure_running()  # first, since it unblocks signals when it starts
        signal.pthread_sigmask(
            signal.SIG_BLOCK, {signal.SIGINT}
        )  # of this thread, and so of its children: Ctrl-C is the launcher's
        store = TCPStore("localhost", devices.port, is_master=True, wait_for_workers=False)
        world = prepared.plan.world_size
        context = start_processes(  # type: ignore[no-untyped-call]
            _spawned,
            (prepared.attempt.to_json(), world, store.port),
            nprocs=world,
            join=False,
            start_method="spawn",
        )
        assert context is not None
        try:
            while not context.join():
                pass
            return Ends({})
        except (ProcessExitedException, ProcessRaisedException):
            return Ends(
                {
                    rank: process.exitcode
                    for rank, process in enumerate(context.processes)
                    if process.exitcode
                }
            )

    return _waited(prepared, devices, run)


def _spawned(index: int, argument: str, world: int, port: int) -> None:
    os.environ.update(
        RANK=str(index),
        LOCAL_RANK=str(index),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    main(argument)


def _waited(
    prepared: PreparedRun, devices: Devices, run: Callable[[], Ends]
) -> SamecurveError | None:
    """run() in a thread, this one free for signals and for watching the ranks.

    What it found, or raised, explained.
    """
    found: dict[str, Any] = {}
    watch, hang = _watch(prepared, devices), None

    def target() -> None:
        try:
            found["ends"] = run()
        except BaseException as error:
            found["error"] = error

    starved = oom_kills()
    thread = threading.Thread(target=target, name="launcher")
    thread.start()
    failed: float | None = None
    while thread.is_alive():
        thread.join(OFTEN)
        if failed is None and hang is None:
            hang = watch.look()
        if failed is None and any(prepared.run.logs.glob("failure-*.json")):
            failed = time.monotonic()
        if failed is not None and time.monotonic() - failed > _GRACE:
            watch.kill()  # stopped, or in a collective that will never end
    if hang:
        return hang
    if "error" in found:
        return explain([note_of(0, found["error"])], {}, prepared.run.logs)
    ends: Ends = found["ends"]
    if not ends.failed:
        return None
    notes = read_notes(prepared.run.logs, prepared.attempt.name)
    return explain(
        notes,
        ends.failed,
        prepared.run.logs,
        oom_kills=oom_kills_since(starved),
        world_size=prepared.plan.world_size,
        left_early=ends.left,
    )


LAUNCHERS = {"direct": direct, "elastic": elastic, "spawn": spawn}
