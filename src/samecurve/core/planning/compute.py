"""The arithmetic of a step: precision, threads, compilation and what else the section `train` asks.

What can't be computed so is refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from samecurve.core.config.train_section import Train
from samecurve.core.config.values import Precision, Recompute
from samecurve.core.planning.decision import Decision
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.fixed import Fixed
from samecurve.core.planning.layout import Layout
from samecurve.core.planning.machine import Device
from samecurve.errors import UserError
from samecurve.units import counted


@dataclass(frozen=True, kw_only=True)
class Compute:
    """How a step is computed, on whatever devices."""

    precision: Precision
    threads: int  # inside one device's operations
    recompute: Recompute
    compile: bool = False
    float8: bool = False
    # microbatches are computed one by one, and their results are added along TreeSum's tree
    exact: bool = False
    norm_sync: bool = False  # BatchNorm over all samples of a step
    keyed_dropout: bool = False  # random masks follow the sample
    whole_batch: bool = False  # the loss is one of the whole batch's features (Task.batch_loss)
    allow_coupled: bool = False  # what the split check finds is said, not refused
    ema: float = 0.0  # decay of the weights' moving average; 0: there is none
    non_finite: str = "stop"


def choose_compute(train: Train, facts: Facts, *, precision: Precision, threads: int) -> Compute:
    """The arithmetic of a step, of what the section `train` asks and what the model has."""
    return Compute(
        precision=precision,
        threads=threads,
        recompute=train.recompute,
        compile=train.compile,
        float8=train.float8,
        exact=train.exact,
        norm_sync=train.norm_sync and bool(facts.coupled),
        keyed_dropout=bool(facts.keyed_dropout),
        whole_batch=facts.whole_batch,
        allow_coupled=train.allow_coupled,
        ema=train.ema,
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


def choose_threads(
    threads: int | None, train: Train, layout: Layout, *, cores: int, fixed: Fixed | None
) -> Decision[int]:
    """Threads inside one device's operations.

    Their number changes the order in which a CPU adds, so exact runs keep it.

    threads: devices.threads. UserError: threads are asked for where they have no meaning.
    """
    num_devices = layout.num_devices
    on_cpu = layout.devices[0].kind == "cpu"
    if threads and (not on_cpu or layout.engine == "jax"):
        raise UserError(
            "devices.threads is for CPU ranks of engine torch", "leave it out", "devices.threads"
        )
    if train.exact and on_cpu and layout.engine == "torch":
        return _choose_exact_threads(threads, fixed)
    if threads:
        return Decision(threads, {"threads": "devices.threads"})
    unit = "device" if layout.world_size < num_devices else "rank"
    reason = f"{counted(cores, 'core')} for {counted(num_devices, unit)}"
    return Decision(max(1, cores // num_devices), {"threads": reason})


def _choose_exact_threads(threads: int | None, fixed: Fixed | None) -> Decision[int]:
    if fixed is None and threads:
        return Decision(threads, {"threads": "devices.threads"})
    if fixed is None:
        reason = (
            "1 for each rank, whatever the machine, so that every rank adds in the same order"
            " (devices.threads gives more)"
        )
        return Decision(1, {"threads": reason})
    warnings: tuple[str, ...] = ()
    if threads and threads != fixed.threads:
        warning = (
            f"devices.threads {threads}: this run began with {fixed.threads} threads a rank, and"
            " train.exact keeps them"
        )
        warnings = (warning,)
    return Decision(fixed.threads, {"threads": "as this run began"}, warnings)


def check_compile(train: Train, engine: str) -> None:
    """UserError: the model can't be compiled here."""
    if train.compile and engine == "jax":
        raise UserError(
            "train.compile is for engine torch: jax compiles its step anyway",
            "leave --compile out (--set train.compile=false, where a file asks for it)",
            "train.compile",
        )
    if train.compile and train.exact:
        raise UserError(
            "train.exact: a compiled kernel is made, and on a GPU chosen by its time, where it"
            " runs: its bits may differ between devices",
            "leave --compile out (--set train.compile=false, where a file asks for it), or --exact",
            "train.compile",
        )


def say_compile(train: Train, facts: Facts) -> Decision[None]:
    """The reason shown for train.compile: the parts that are compiled, and their cost."""
    if not train.compile:
        return Decision(None)
    parts = "the model as a whole: it has no repeated blocks"
    if facts.blocks > 1:
        parts = f"{facts.blocks} blocks, one program for all that are alike"
    reason = f"{parts}; the first steps, and the first of each other shape, take longer"
    return Decision(None, {"compile": reason})


def check_float8(train: Train, precision: Precision, layout: Layout, blocks: int | None) -> None:
    """UserError: products in eight bits are asked for where there are none.

    blocks: repeated layers of the model; None: not known yet
    """
    if not train.float8:
        return
    device = layout.devices[0]
    refused = {
        "it is for engine torch": layout.engine != "torch",
        "it rounds, which train.exact is there to rule out": train.exact,
        f"CPU ranks have no products in eight bits ({device.name})": device.kind == "cpu",
        f"{device.name} has no products in eight bits": device.lacks("float8"),
        f"weights and other products are to be bf16, not {precision}": precision != "bf16",
        "the model has no repeated blocks whose layers it could convert": blocks is not None
        and blocks < 2,
    }
    for why, is_so in refused.items():
        if is_so:
            remedy = "--dtype bf16" if "bf16" in why else "leave it out"
            raise UserError(f"train.float8: {why}", remedy, "train.float8")


def say_float8(train: Train) -> Decision[None]:
    """The reason and the warnings shown for train.float8."""
    if not train.float8:
        return Decision(None)
    reason = (
        "products of the blocks' linear layers in eight bits, scaled by each tensor's largest value"
    )
    warnings = ["train.float8: results change: products are rounded to eight bits"]
    if not train.compile:
        warnings.append(
            "train.float8 without --compile is slower than bf16: scaling takes more than the"
            " products save"
        )
    return Decision(None, {"float8": reason}, tuple(warnings))


def say_dropout(facts: Facts) -> Decision[None]:
    """The reason shown for layers whose random masks follow the sample."""
    count = len(facts.keyed_dropout)
    if not count:
        return Decision(None)
    reason = f"masks of {counted(count, 'layer')} follow the sample, whatever the device"
    return Decision(None, {"dropout": reason})


def say_average(train: Train) -> Decision[None]:
    """The reason shown for train.ema."""
    if not train.ema:
        return Decision(None)
    reason = (
        f"after each step {train.ema:g} x the average + {1 - train.ema:g} x the weights, from the"
        " first weights on: it is evaluated, sampled and exported"
    )
    return Decision(None, {"ema": reason})


def check_model_computes(train: Train, precision: Precision, facts: Facts) -> None:
    """UserError: the model can't run blocks again, or not in this precision."""
    if train.recompute != "none" and facts.blocks < 2:
        raise UserError(
            f"train.recompute {train.recompute}: the model has no repeated blocks that could"
            " be run again",
            "its layers in a ModuleList or Sequential, or leave it out",
            "train.recompute",
        )
    if facts.narrow_only and precision not in {"bf16", "f16"}:
        raise UserError(
            f"{facts.narrow_only} computes in bf16 and f16 only; train.precision is {precision}",
            "--dtype bf16, or leave it out",
            "train.precision",
        )
