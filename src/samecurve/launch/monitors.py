"""Readers beside a run: sensors in a thread of the launcher, and trackers in their processes."""

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from samecurve.core.config.sections import Track
from samecurve.core.determinism.microbatches import split_batch
from samecurve.core.planning.plan import Plan
from samecurve.errors import SamecurveError
from samecurve.observe import follow
from samecurve.observe.sensors import IDLE_SECONDS, record_sensors
from samecurve.probe.sensors import Sensors
from samecurve.run.directory import Run
from samecurve.run.preconditions import trackers_wanted
from samecurve.run.start_files import PreparedRun
from samecurve.units import counted

if TYPE_CHECKING:
    from samecurve.probe.gpu_health import GpuHealth

_KUBEFLOW = "KUBEFLOW_TRAINER_SERVER_URL"  # Trainer sets it where progress is reported to it
DRAIN = 120.0  # seconds for a tracker to take the rest: an upload may be slow


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
