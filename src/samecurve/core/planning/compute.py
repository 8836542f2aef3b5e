"""The arithmetic of a step: what the section `train` asks for, and what model and loss do.

What can't be computed so is refused; so is what would make the result depend on the devices.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from samecurve.core.config import Precision
from samecurve.core.config.sections import Devices
from samecurve.core.config.train_section import Train
from samecurve.core.planning import Decision, DecisionLog
from samecurve.core.planning.batch import BatchSplit
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.layout import Layout
from samecurve.core.planning.machine import Device, Machine
from samecurve.core.strategies import Reducer
from samecurve.errors import UserError
from samecurve.units import counted, first_and_count


@dataclass(frozen=True, kw_only=True)
class Compute:
    """How a step is computed, on whatever devices."""

    precision: Precision
    threads: int  # inside one device's operations
    same_bits: bool = False  # on any devices; exact.py decides
    keyed_dropout: bool = False  # random masks follow the sample
    allow_coupled: bool = False  # what the split check finds is said, not refused
    non_finite: str = "stop"

    # Four decisions, independent of each other. Where all are so, a run has the same bits on any
    # devices. Whoever acts on one of them asks it, and not `same_bits`:

    @property
    def fixed_microbatches(self) -> bool:
        """Whether microbatches have one size on any devices; else the devices cut the batch."""
        return self.same_bits

    @property
    def reducer(self) -> Reducer:
        """What adds up gradients over microbatches and devices."""
        return "tree" if self.same_bits else "collective"

    @property
    def deterministic(self) -> bool:
        """Whether kernels give the same bits each time."""
        return self.same_bits

    @property
    def fixed_threads(self) -> bool:
        """Whether a device computes with the same number of threads on any devices."""
        return self.same_bits


def choose_compute(
    train: Train,
    facts: Facts,
    *,
    precision: Precision,
    threads: int,
    same_bits: bool,
) -> Compute:
    """The arithmetic of a step, from what the section `train` asks for and what the model has."""
    return Compute(
        precision=precision,
        threads=threads,
        same_bits=same_bits,
        keyed_dropout=bool(facts.keyed_dropout),
        allow_coupled=train.allow_coupled,
        non_finite=train.non_finite,
    )


def choose_precision(train: Train, engine: str, devices: Sequence[Device]) -> Decision[Precision]:
    """The precision of matrix products: the config's, or the one that train.amp chooses.

    UserError: train.amp with an engine for which it can't choose.
    """
    precision, reason = train.precision, "train.precision"
    if train.amp and precision == "f32":
        if engine != "torch":
            raise UserError(
                "train.amp chooses a precision for engine torch",
                "--dtype bf16, or --no-amp",
                "train.amp",
            )
        lacking = [device.name for device in devices if device.lacks("bf16")]
        if any(device.kind == "cpu" for device in devices):
            reason = "train.amp: f32 on CPUs"
        elif lacking:
            precision = "f16"
            reason = f"train.amp: {lacking[0]} has no bf16; --no-amp is f32"
        else:
            precision, reason = "bf16", "train.amp; --no-amp is f32"
    if precision == "f32" and devices[0].peak("bf16"):
        reason += "; --dtype bf16 is several times faster on this GPU"
    return Decision(precision, {"precision": reason})


def check_precision(precision: Precision, layout: Layout) -> None:
    """UserError: a device can't compute in this precision."""
    lacking = [device for device in layout.devices if device.lacks(precision)]
    if lacking and layout.engine == "torch":
        raise UserError(
            f"train.precision {precision}: {lacking[0].name} has no {precision}",
            "--dtype f16 (its losses are scaled), or f32",
            "train.precision",
        )


def check_threads(section: Devices, layout: Layout) -> None:
    """UserError: threads are asked for where they have no meaning."""
    if section.threads and (layout.devices[0].kind != "cpu" or layout.engine == "jax"):
        raise UserError(
            "devices.threads is for CPU ranks of engine torch", "leave it out", "devices.threads"
        )


def choose_threads(section: Devices, layout: Layout, machine: Machine) -> Decision[int]:
    """Threads inside one device's operations. UserError: as check_threads()."""
    check_threads(section, layout)
    threads, num_devices = section.threads, layout.num_devices
    if threads:
        return Decision(threads, {"threads": "devices.threads"})
    if machine.threads:
        return Decision(machine.threads, {"threads": "OMP_NUM_THREADS; devices.threads wins"})
    unit = "device" if layout.world_size < num_devices else "rank"
    cores = machine.cores
    reason = f"{counted(cores, 'core')} for {counted(num_devices, unit)}"
    return Decision(max(1, cores // num_devices), {"threads": reason})


def check_model_computes(precision: Precision, facts: Facts) -> None:
    """UserError: the model can't compute in this precision."""
    narrow_only = facts.quantized.narrow_only
    if narrow_only and precision not in {"bf16", "f16"}:
        raise UserError(
            f"{narrow_only} computes in bf16 and f16 only; train.precision is {precision}",
            "--dtype bf16, or leave it out",
            "train.precision",
        )


def check_coupled(
    log: DecisionLog,
    train: Train,
    coupled: Sequence[str],
    split: BatchSplit,
    *,
    fixed_microbatches: bool,
    settled: str,
) -> None:
    """Log why a model that mixes samples gives the same result here, or warn that it may not.

    coupled: layers that mix samples. settled: why it gives the same with a feature; '': there is
        none

    UserError: they would be split, and the config forbids that.
    """
    if not coupled:
        if train.allow_coupled:
            log.warnings.append(
                "train.allow_coupled: a loss that does not add up over samples, or draws numbers"
                " that follow no sample, is trained all the same; results may then depend on the"
                " devices"
            )
        return
    layers = first_and_count(coupled)
    others = [name for name in coupled if not name.startswith("BatchNorm")]
    is_whole, rounds = split.num_microbatches == 1, split.accumulation_steps
    if settled:
        log.reasons["coupled"] = settled
    elif not others and is_whole:
        log.reasons["coupled"] = f"{layers}: one microbatch a step, so nothing is split"
    elif train.allow_coupled and fixed_microbatches:
        log.reasons["coupled"] = (
            f"{layers} mixes the samples of a microbatch, which are the same on any devices"
            " (train.exact)"
        )
    elif train.allow_coupled:
        log.warnings.append(
            f"{layers} mixes the samples of a microbatch: results depend on the"
            f" {split.num_devices} devices and {rounds} rounds (train.allow_coupled)"
        )
    else:
        raise _coupled_split(others or coupled, split, norms_only=not others)


def _coupled_split(coupled: Sequence[str], split: BatchSplit, *, norms_only: bool) -> UserError:
    devices, rounds = counted(split.num_devices, "device"), split.accumulation_steps
    remedy = (
        "a norm that treats each sample by itself (GroupNorm, LayerNorm); --set"
        " train.allow_coupled=true trains it all the same"
    )
    if not norms_only:
        remedy = (
            "features() and batch_loss() in place of loss(): the loss then sees the whole batch,"
            " however it is split; --set train.allow_coupled=true trains it all the same"
        )
    elif rounds == 1:
        remedy = f"--set train.norm_sync=true takes its statistics over all devices; or {remedy}"
    else:
        remedy = f"a batch that fits in one round, with --set train.norm_sync=true; or {remedy}"
    return UserError(
        f"{first_and_count(coupled)} mixes the samples of a batch, so the result would depend on"
        f" how it is split: here over {devices} in {counted(rounds, 'round')}",
        remedy,
        "model",
    )


def say_task(log: DecisionLog, facts: Facts) -> None:
    """Log what is done with the model besides its updates, which masks follow samples, and the
    task's own notes.
    """
    if facts.notes:
        log.reasons["task"] = "\n".join(facts.notes)
    if count := len(facts.keyed_dropout):
        log.reasons["dropout"] = (
            f"masks of {counted(count, 'layer')} follow the sample, whatever the device"
        )
