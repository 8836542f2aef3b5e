"""What makes steps faster and asks for something: train.precision, train.compile, train.float8.

Refused, or said, by plan().
"""

from collections.abc import Sequence

from samecurve.core.config.sections import Config
from samecurve.core.config.values import Precision
from samecurve.core.planning.decision import Decision
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.layout import Layout
from samecurve.core.planning.machine import Device
from samecurve.errors import UserError


def check_compile(config: Config, facts: Facts) -> Decision[bool]:
    """Whether the model is compiled.

    UserError: asked for where it can't be.
    """
    if not config.train.compile:
        return Decision(False)
    if config.engine == "jax":
        raise UserError(
            "train.compile is for engine torch: jax compiles its step anyway",
            "leave --compile out (--set train.compile=false, where a file asks for it)",
            "train.compile",
        )
    if config.train.exact:
        raise UserError(
            "train.exact: a compiled kernel is made, and on a GPU chosen by its time, where it"
            " runs: its bits may differ between devices",
            "leave --compile out (--set train.compile=false, where a file asks for it), or --exact",
            "train.compile",
        )
    parts = "the model as a whole: it has no repeated blocks"
    if facts.blocks > 1:
        parts = f"{facts.blocks} blocks, one program for all that are alike"
    reason = f"{parts}; the first steps, and the first of each other shape, take longer"
    return Decision(True, {"compile": reason})


def check_float8(config: Config, facts: Facts, layout: Layout) -> Decision[bool]:
    """Whether products are taken in eight bits.

    UserError: asked for where it can't be.
    """
    train = config.train
    if not train.float8:
        return Decision(False)
    device = layout.devices[0]
    refused = {
        "it is for engine torch": config.engine != "torch",
        "it rounds, which train.exact is there to rule out": train.exact,
        f"CPU ranks have no products in eight bits ({device.name})": device.kind == "cpu",
        f"{device.name} has no products in eight bits": device.lacks("float8"),
        f"weights and other products are to be bf16, not {train.precision}": (
            train.precision != "bf16"
        ),
        "the model has no repeated blocks whose layers it could convert": facts.blocks < 2,
    }
    for why, is_so in refused.items():
        if is_so:
            remedy = "--dtype bf16" if "bf16" in why else "leave it out"
            raise UserError(f"train.float8: {why}", remedy, "train.float8")
    reason = (
        "products of the blocks' linear layers in eight bits, scaled by each tensor's largest value"
    )
    warnings = ["train.float8: results change: products are rounded to eight bits"]
    if not train.compile:
        warnings.append(
            "train.float8 without --compile is slower than bf16: scaling takes more than the"
            " products save"
        )
    return Decision(True, {"float8": reason}, tuple(warnings))


def with_amp(config: Config, devices: Sequence[Device]) -> tuple[Config, str]:
    """The config with the precision that train.amp comes to on these devices, and why.

    UserError: the engine has none.
    """
    train = config.train
    if not train.amp or train.precision != "f32":
        return config, "train.precision"
    if config.engine != "torch":
        raise UserError(
            "train.amp chooses a precision for engine torch",
            "--dtype bf16, or --no-amp",
            "train.amp",
        )
    if any(device.kind == "cpu" for device in devices):
        return config, "train.amp: f32 on CPUs"
    precision, reason = "bf16", "train.amp; --no-amp is f32"
    lacking = [device.name for device in devices if device.lacks("bf16")]
    if lacking:
        precision, reason = "f16", f"train.amp: {lacking[0]} has no bf16; --no-amp is f32"
    train = train.model_copy(update={"precision": precision})
    return config.model_copy(update={"train": train}), reason


def choose_precision(config: Config, layout: Layout, reason: str) -> Decision[Precision]:
    """reason: for the config's. UserError: a device has no such numbers."""
    precision = config.train.precision
    lacking = [device for device in layout.devices if device.lacks(precision)]
    if lacking and config.engine == "torch":
        raise UserError(
            f"train.precision {precision}: {lacking[0].name} has no {precision}",
            "--dtype f16 (its losses are scaled), or f32",
            "train.precision",
        )
    if precision == "f32" and layout.devices[0].peak("bf16"):
        reason += "; --dtype bf16 is several times faster on this GPU"
    return Decision(precision, {"precision": reason})
