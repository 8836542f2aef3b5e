"""Starts the ranks of a plan on this machine and waits for them: in place for one device, else as processes that die with this one.

The launcher owns signals: the first asks the run to stop (it saves at the step's end, all ranks leave together), the second kills.
"""

import logging
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from typing import Any

import psutil

from lockstep.core.config import Devices
from lockstep.core.plan import Plan
from lockstep.core.protocols import Rank
from lockstep.diagnose.crash import explain
from lockstep.diagnose.notes import note_of, read_notes
from lockstep.errors import LockstepError
from lockstep.launch.files import Run, ask
from lockstep.launch.preflight import record_failure
from lockstep.launch.prepare import Prepared
from lockstep.launch.signals import LAUNCHER, STOP_SIGNAL, STOPPING, Signals, leave_at_once
from lockstep.launch.watching import tracked, watched
from lockstep.launch.worker import main, work
from lockstep.observe.console import View, showing, view
from lockstep.probe.cpu import oom_kills

_GRACE = 10.0  # seconds in which ranks leave by themselves after one has failed


def launch(prepared: Prepared, devices: Devices, headless: bool, chosen: View | None = None) -> int:
    """Train what was prepared. chosen: shows what happens; None: as a terminal wants it. Returns the exit code: 0, or 128 + the signal that stopped it. LockstepError: why it failed, once."""
    run, plan, attempt = prepared.run, prepared.plan, prepared.attempt
    alone = plan.in_place
    ask_stop = _leaver(run) if attempt.evaluate else _stopper(run, attempt.name, headless, alone)
    start = _in_place if alone else (_spawn if devices.launcher == "spawn" else _elastic)
    try:
        with showing(chosen or view(plan, run.home, headless), run.journal, prepared.begin), tracked(run, prepared.track), Signals(ask_stop, leave_at_once) as signals, _environment(plan):
            with watched(run, plan, prepared.track.sensors_every):
                failure = start(prepared, devices)
            if failure:
                record_failure(run, failure)
    finally:
        prepared.lock.release()
    if failure:
        raise failure
    return 128 + signals.received if signals.received else 0


def _stopper(run: Run, attempt: str, headless: bool, in_place: bool) -> Callable[[], None]:
    def stop() -> None:
        try:
            ask(run, attempt, "stop")
        except OSError:  # a full disk: told directly instead
            for pid in [os.getpid()] if in_place else _ranks():
                os.kill(pid, STOP_SIGNAL)
        if not headless:
            os.write(2, STOPPING)

    return stop


def _leaver(run: Run) -> Callable[[], None]:
    """Of an evaluation, which has nothing to save."""

    def leave() -> None:
        leave_at_once()
        shutil.rmtree(run.home, ignore_errors=True)
        os.write(2, b"\nstopped: nothing was evaluated\n")
        os._exit(130)

    return leave


@contextmanager
def _environment(plan: Plan) -> Iterator[None]:
    """What ranks inherit; what the user set stays."""
    defaults = {"OMP_NUM_THREADS": str(plan.threads), "PYTHONUNBUFFERED": "1", "PYTHONHASHSEED": "0", LAUNCHER: str(os.getpid())}
    if plan.devices[0].kind == "cuda":
        defaults |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "PYTORCH_ALLOC_CONF": "expandable_segments:True", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    if plan.devices[0].kind == "cpu" and plan.shards > 1:
        defaults["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)  # else glibc keeps what each gathered block leaves: measured 804 MiB instead of 326 after 4 steps of 26M parameters
    added = {name: value for name, value in defaults.items() if name not in os.environ or name == LAUNCHER}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _in_place(prepared: Prepared, devices: Devices) -> LockstepError | None:
    try:
        work(prepared.attempt, Rank(0, 0, 1))
        return None
    except Exception as error:
        with open(prepared.run.logs / "rank-0.log", "a") as log:
            traceback.print_exc(file=log)
        return explain([note_of(0, error)], {}, prepared.run.logs)


def _elastic(prepared: Prepared, devices: Devices) -> LockstepError | None:
    """torch's elastic agent, in a thread, so that signals stay with us."""

    def run() -> Mapping[int, int]:
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=prepared.plan.processes, run_id=prepared.attempt.name, rdzv_backend="c10d",
            rdzv_endpoint=f"localhost:{devices.port}", max_restarts=0, monitor_interval=0.1, logs_specs=DefaultLogsSpecs())
        try:
            elastic_launch(config, sys.executable)("-u", "-m", "lockstep.launch.worker", prepared.attempt.to_json())
            return {}
        except ChildFailedError as error:
            return {rank: failure.exitcode for rank, failure in error.failures.items()}

    return _waited(prepared, run)


def _spawn(prepared: Prepared, devices: Devices) -> LockstepError | None:
    """torch.multiprocessing, in a thread, its ranks meeting at a store that this process serves."""

    def run() -> Mapping[int, int]:
        from torch._C._distributed_c10d import TCPStore  # public as torch.distributed.TCPStore, where type checkers don't see it
        from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

        logging.getLogger("torch.multiprocessing").setLevel(logging.CRITICAL)
        resource_tracker.ensure_running()  # first, since it unblocks signals when it starts
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # of this thread, and so of its children: Ctrl-C is the launcher's
        store = TCPStore("localhost", devices.port, is_master=True, wait_for_workers=False)
        world = prepared.plan.processes
        context = start_processes(  # type: ignore[no-untyped-call]
            _spawned, (prepared.attempt.to_json(), world, store.port), nprocs=world, join=False, start_method="spawn")
        assert context is not None
        try:
            while not context.join():
                pass
            return {}
        except (ProcessExitedException, ProcessRaisedException):
            return {rank: process.exitcode for rank, process in enumerate(context.processes) if process.exitcode}

    return _waited(prepared, run)


def _spawned(index: int, argument: str, world: int, port: int) -> None:
    os.environ.update(RANK=str(index), LOCAL_RANK=str(index), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), MASTER_ADDR="localhost", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    main(argument)


def _waited(prepared: Prepared, run: Callable[[], Mapping[int, int]]) -> LockstepError | None:
    """run() in a thread, this one free for signals. What it found, or raised, explained."""
    found: dict[str, Any] = {}

    def target() -> None:
        try:
            found["exits"] = run()
        except BaseException as error:
            found["error"] = error

    starved = oom_kills()
    thread = threading.Thread(target=target, name="launcher")
    thread.start()
    failed: float | None = None
    while thread.is_alive():
        thread.join(0.2)
        if failed is None and any(prepared.run.logs.glob("failure-*.json")):
            failed = time.monotonic()
        if failed is not None and time.monotonic() - failed > _GRACE:
            for pid in _ranks():  # stopped, or in a collective that will never end
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
    if "error" in found:
        return explain([note_of(0, found["error"])], {}, prepared.run.logs)
    if not found["exits"]:
        return None
    now = oom_kills()
    return explain(
        read_notes(prepared.run.logs, prepared.attempt.name), found["exits"], prepared.run.logs, starved=None if now is None or starved is None else now - starved, world=prepared.plan.processes)


def _ranks() -> list[int]:
    """Process ids of the ranks that this process started."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it may just have ended
            if {"lockstep.launch.worker", "--multiprocessing-fork"} & set(child.cmdline()):
                found.append(child.pid)
    return found
