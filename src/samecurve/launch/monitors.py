"""What goes on beside a run: its sensors, read in a thread, and its trackers, each a process that
reads the journal.

A tracker's process ends when its standard input does, once it has read the journal to its end: so
it outlives a killed launcher by no more than that.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from samecurve.core.config.sections import Track
from samecurve.core.determinism.microbatches import split_batch
from samecurve.core.events import Event
from samecurve.core.planning.plan import Plan
from samecurve.observe.heartbeat import read_heartbeat
from samecurve.observe.journal import append_event, follow
from samecurve.observe.sensors import IDLE_SECONDS, record_sensors
from samecurve.observe.trackers import EXIT_REPORTED, TITLES, TRAINING_GOES_ON
from samecurve.probe.sensors import Sensors
from samecurve.run.directory.run_directory import Run
from samecurve.run.preconditions import trackers_wanted
from samecurve.run.start_files import PreparedRun
from samecurve.units import counted

DRAIN = 120.0  # seconds for a tracker to take the rest: an upload may be slow
_QUIET = 3.0  # seconds after which somebody who waits is told for what


def done_line(prepared: PreparedRun) -> str:
    """What is said of a run that has nothing left to train, once its trackers have what they
    missed.
    """
    steps, step = prepared.plan.steps, prepared.step
    words = f"{steps} of {steps} steps were trained before; --max-steps N trains on"
    if step < steps:
        words = (
            f"it stopped early at step {step} of {steps}; --set train.early_stop.patience=N, more"
            " than it was, trains on"
        )
    warned = "".join(f"warn   {text}\n" for text in catch_up(prepared.run, prepared.track))
    return f"{warned}done   {words}, another --save-dir begins anew  {prepared.run.home}"


@contextmanager
def watched(run: Run, plan: Plan, every: float, patience: float = IDLE_SECONDS) -> Iterator[None]:
    """Sensor lines in the journal while the block trains.

    every: seconds between them; 0: none.
    patience: seconds until an idle device is worth a word.
    """
    if not every:
        yield
        return
    owners = [process for process in range(plan.world_size) for _ in plan.devices_of(process)]
    sensors = Sensors(plan.devices, owners, plan.threads)
    with ExitStack() as stack:
        stack.callback(sensors.close)
        stack.enter_context(
            record_sensors(
                lambda: sensors.read(run.processes()),
                lambda idle: _idle(plan, owners, idle, patience),
                heartbeat=run.logs / "heartbeat-0",
                journal=run.journal,
                interval=every,
                patience=patience,
            )
        )
        yield


def _idle(plan: Plan, owners: Sequence[int], idle: Sequence[int], patience: float) -> str:
    """Which devices do nothing, and what may help."""
    devices = ", ".join(
        f"{device} ({plan.devices[device].place}, rank {owners[device]})" for device in idle
    )
    count = len(split_batch(plan.global_batch_size, plan.micro_batch_size))
    without = [device for device in idle if not plan.batch.microbatches_per_device[device]]
    idle_ranks = dict.fromkeys(owners[device] for device in idle)
    logs = ", ".join(f"logs/rank-{rank}.log" for rank in idle_ranks)
    if count < plan.num_devices:
        remedy = (
            f"a step is {counted(count, 'microbatch')} of {plan.micro_batch_size} samples for"
            f" {plan.num_devices} devices: a larger --global-batch, or fewer devices"
            " (--gpus, --devices)"
        )
    elif without:
        them = "them" if len(without) > 1 else "it"
        remedy = (
            f"devices.balance assigns {them} no microbatch, since the others are so much faster:"
            f" leave {them} to another run (--gpus)"
        )
    elif plan.world_size > 1:
        remedy = (
            f"a rank may be stuck ({logs}) or wait for data (--prefetch); a larger --global-batch"
            " gives each device more to do"
        )
    else:
        remedy = "a larger --global-batch gives each device more to do; --gpus names those to use"
    plural = "s" if len(idle) > 1 else ""
    return f"device{plural} {devices} did nothing for {patience:g} s while others worked: {remedy}"


@contextmanager
def tracked(run: Run, track: Track, drain: float = DRAIN) -> Iterator[None]:
    """TensorBoard and W&B beside the block, as the config asks; after it, at most `drain` seconds
    to take what is left, or until Ctrl-C.
    """
    trackers = [Tracker(name, run, track) for name in trackers_wanted(track)]
    try:
        yield
    finally:
        for tracker in trackers:
            tracker.finish(drain)


def catch_up(run: Run, track: Track) -> list[str]:
    """For a run that has nothing left to train: its trackers take what they missed.

    Returns what they warned of.
    """
    before = run.journal.stat().st_size
    with tracked(run, track):
        pass
    ended = threading.Event()
    ended.set()
    return [
        str(event.values["text"])
        for event in follow(run.journal, ended, before)
        if event.kind == "warned"
    ]


class Tracker:
    """The process of one tracker. How it failed is said once, in the journal; the run goes on."""

    def __init__(self, name: str, run: Run, track: Track) -> None:
        self._name, self._run, self._ending = name, run, False
        self._process: subprocess.Popen[bytes] | None = None
        mode_and_project = ["file", ""]
        if name == "wandb":
            mode_and_project = [track.wandb, track.wandb_project]
        try:
            with open(run.logs / f"{name}.log", "ab") as log:
                self._process = subprocess.Popen(
                    [
                        sys.executable,
                        "-P",
                        "-m",
                        "samecurve.observe.trackers",
                        name,
                        str(run.home),
                        *mode_and_project,
                    ],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )  # a session of its own: Ctrl-C is the launcher's
        except OSError as error:
            self._warn(f"could not be started: {error.strerror}")
            return
        self._watch = threading.Thread(target=self._wait, name=name, daemon=True)
        self._watch.start()

    def finish(self, drain: float) -> None:
        """Its input ends; wait until it has taken everything."""
        if self._process is None or self._process.stdin is None:
            return
        with suppress(OSError):  # it has ended
            self._process.stdin.close()
        try:
            with suppress(KeyboardInterrupt):
                self._watch.join(_QUIET)
                if self._watch.is_alive():
                    title = TITLES[self._name]
                    os.write(
                        2, f"waiting for {title} to take the rest; Ctrl-C leaves it\n".encode()
                    )
                    self._watch.join(drain)
        finally:
            if self._watch.is_alive():
                self._ending = True
                self._process.kill()
                self._warn("was left before it had taken everything")

    def _wait(self) -> None:
        assert self._process is not None
        code = self._process.wait()
        if code in {0, EXIT_REPORTED} or self._ending:
            return
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        log = self._run.logs / f"{self._name}.log"
        self._warn(f"its process left with {how}; {log} may say more")

    def _warn(self, what: str) -> None:
        heartbeat = read_heartbeat(self._run.logs / "heartbeat-0")
        step = heartbeat[0] if heartbeat else 0
        text = f"{TITLES[self._name]}: {what}; {TRAINING_GOES_ON}"
        with suppress(OSError):  # a full disk: the run itself says so
            append_event(self._run.journal, Event("warned", step, {"text": text}))
