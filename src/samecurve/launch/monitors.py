"""Readers beside a run: sensors in a thread of the launcher, and trackers in their processes.

The thread writes a `sensors` event every few seconds, and a warning if a device is idle or has a
fault. A failed reading has no values; it neither slows a step nor ends the run.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samecurve.core.config.sections import Track
from samecurve.core.determinism.microbatches import split_batch
from samecurve.core.events import Event
from samecurve.core.planning.plan import Plan
from samecurve.errors import SamecurveError
from samecurve.observe import append_event, follow, read_beat
from samecurve.probe.sensors import Sensors
from samecurve.run.directory import Run
from samecurve.run.preconditions import trackers_wanted
from samecurve.run.start_files import PreparedRun
from samecurve.units import counted

if TYPE_CHECKING:
    from samecurve.probe.gpu_health import GpuHealth

_KUBEFLOW = "KUBEFLOW_TRAINER_SERVER_URL"  # Trainer sets it where progress is reported to it
DRAIN = 120.0  # seconds for a tracker to take the rest: an upload may be slow
IDLE_SECONDS = 60.0  # seconds
_IDLE = 0.05  # utilisation below which a device is idle
_BUSY = 0.15  # utilisation from which a device works
_LAST_READING = 2.0  # seconds to wait for a reading: a driver may hang

Values = Sequence[float | None]


def done_line(prepared: PreparedRun) -> str:
    """The line for a run that has nothing left to train, once its trackers have caught up."""
    steps, step = prepared.plan.steps, prepared.step
    words = f"{steps} of {steps} steps were trained before; --max-steps N trains on"
    if step < steps:
        words = (
            f"it stopped early at step {step} of {steps}; {prepared.plan.to_go_on}, more than it"
            " was, trains on"
        )
    warned = "".join(f"warn   {text}\n" for text in catch_up(prepared.run, prepared.track))
    with mirrored(prepared, lambda: None) as mirror:
        pass
    if mirror.failure:
        raise mirror.failure
    return f"{warned}done   {words}, another --save-dir begins anew  {prepared.run.home}"


@dataclass
class Mirrored:
    """How the mirror of a run ended. failure: why the store lacks something; None: it doesn't."""

    failure: SamecurveError | None = None


@contextmanager
def mirrored(prepared: PreparedRun, stop: Callable[[], None]) -> Iterator[Mirrored]:
    """Mirror the run to its place in a store, if it has one, beside the block and until all is
    sent.

    stop: asks the run to save and leave
    """
    ended = Mirrored()
    if prepared.claim is None:
        yield ended
        return
    from samecurve.run.remote.mirror import Mirror

    start = prepared.journal_start
    mirror = Mirror(prepared.claim, prepared.run, prepared.plan, start=start, stop=stop)
    try:
        yield ended
    finally:
        mirror.finish()
        ended.failure = mirror.failure


@contextmanager
def watched(run: Run, plan: Plan, every: float, patience: float = IDLE_SECONDS) -> Iterator[None]:
    """Write sensor lines into the journal while the block trains.

    every: seconds between two lines; 0: no lines.
    patience: seconds until an idle device is mentioned.
    """
    if not every:
        yield
        return
    owners = [
        process
        for process in range(plan.layout.world_size)
        for _ in plan.layout.devices_of(process)
    ]
    sensors = Sensors(plan.layout.devices, owners, plan.compute.threads)
    health = sensors.gpu_health()
    with ExitStack() as stack:
        stack.callback(sensors.close)
        stack.enter_context(
            record_sensors(
                lambda: sensors.read(run.processes()),
                lambda idle: _idle(plan, owners, idle, patience),
                lambda: _new_faults(plan, owners, health, run.processes()) if health else [],
                heartbeat=run.logs / "heartbeat-0",
                journal=run.journal,
                interval=every,
                patience=patience,
            )
        )
        yield


def _new_faults(
    plan: Plan, owners: Sequence[int], health: "GpuHealth", pids: Mapping[int, int]
) -> list[str]:
    """Say what has gone wrong with the GPUs of this host.

    owners: the process of each device
    pids: the processes that live on this host, by number
    """
    here = {
        device.index: f"{device.place} ({device.name}, rank {owner})"
        for device, owner in zip(plan.layout.devices, owners, strict=True)
        if owner in pids
    }
    return [f"{here[index]}: {text}" for index, text in health.new_faults(here)]


def _idle(plan: Plan, owners: Sequence[int], idle: Sequence[int], patience: float) -> str:
    """Say which devices do nothing, and what may help."""
    devices = ", ".join(
        f"{device} ({plan.layout.devices[device].place}, rank {owners[device]})" for device in idle
    )
    count = len(split_batch(plan.batch.global_batch_size, plan.batch.micro_batch_size))
    without = [device for device in idle if not plan.batch.microbatches_per_device[device]]
    idle_ranks = dict.fromkeys(owners[device] for device in idle)
    logs = ", ".join(f"logs/rank-{rank}.log" for rank in idle_ranks)
    if count < plan.layout.num_devices:
        remedy = (
            f"a step is {counted(count, 'microbatch')} of {plan.batch.micro_batch_size} samples for"
            f" {plan.layout.num_devices} devices: a larger --global-batch, or fewer devices"
            " (--gpus, --devices)"
        )
    elif without:
        them = "them" if len(without) > 1 else "it"
        remedy = (
            f"devices.balance assigns {them} no microbatch, since the others are so much faster:"
            f" leave {them} to another run (--gpus)"
        )
    elif plan.layout.world_size > 1:
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
    """Run TensorBoard and W&B beside the block, as the config asks; Kubeflow, where it asks.

    After the block they have `drain` seconds, or until Ctrl-C, to take what is left.
    """
    names = trackers_wanted(track)
    if _KUBEFLOW in os.environ:
        names.append("kubeflow")
    if not names:
        yield
        return
    from samecurve.launch.tracker_process import Tracker

    trackers = [Tracker(name, run, track) for name in names]
    try:
        yield
    finally:
        for tracker in trackers:
            tracker.finish(drain)


def catch_up(run: Run, track: Track) -> list[str]:
    """Have the trackers of a run that has nothing left to train take what they missed.

    Returns what the trackers warned of.
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


class IdleDevices:
    """Find devices that are idle for `patience` seconds while another device works.

    Each device is reported once, and again only after it has worked.
    """

    def __init__(self, patience: float = IDLE_SECONDS) -> None:
        self._patience = patience
        self._idle_since: dict[int, float] = {}
        self._reported: set[int] = set()

    def add(self, at: float, utilisation: Values) -> list[int]:
        """The devices to report now.

        at: seconds
        utilisation: of each device; None: unknown, neither idle nor busy
        """
        known = {device: value for device, value in enumerate(utilisation) if value is not None}
        idle = {device for device, value in known.items() if value < _IDLE}
        self._reported -= known.keys() - idle
        if any(value >= _BUSY for value in known.values()):
            self._idle_since = {device: self._idle_since.get(device, at) for device in idle}
        else:
            self._idle_since = {}
        newly = [
            device
            for device, since in self._idle_since.items()
            if at - since >= self._patience and device not in self._reported
        ]
        self._reported.update(newly)
        return newly


@contextmanager
def record_sensors(
    read: Callable[[], dict[str, Any]],
    warning: Callable[[Sequence[int]], str],
    new_faults: Callable[[], Sequence[str]],
    *,
    heartbeat: Path,
    journal: Path,
    interval: float,
    patience: float = IDLE_SECONDS,
) -> Iterator[None]:
    """Append readings to the journal until the block ends.

    read: returns the values of a `sensors` event
    warning: makes the text of a warning about idle devices
    new_faults: texts on what has gone wrong with devices since the last reading
    heartbeat: the first rank's; devices are judged only while this rank trains
    interval: seconds between readings
    """
    stop = threading.Event()

    def work() -> None:
        idle_devices = IdleDevices(patience)
        while not stop.wait(interval):
            values = read()
            beat = read_beat(heartbeat)
            if beat is None or beat.activity in {"start", "end"} or stop.is_set():
                continue
            utilisation: Values = ()
            if beat.activity == "step":  # in other activities a device may be idle
                utilisation = values.get("utilisation_by_device", ())
            texts = list(new_faults())
            if idle := idle_devices.add(time.monotonic(), utilisation):
                texts.append(warning(idle))
            with suppress(OSError):  # a full disk: the journal's own writer ends the run
                append_event(journal, Event("sensors", beat.step, values))
                for text in texts:
                    append_event(journal, Event("warned", beat.step, {"text": text}))

    thread = threading.Thread(target=work, name="sensors", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(_LAST_READING)
