"""What flags that mean more than one config value, or one of another form, set in a document."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from samecurve.core.strategies import STRATEGIES
from samecurve.errors import UserError

if TYPE_CHECKING:
    from samecurve.core.config.document import Document

Flags = Mapping[str, Any]  # of a command line: parameter -> value; None: not given


def apply_flags(document: "Document", flags: Flags) -> None:
    """Flags that mean more than one value, or a value of another form."""
    if flags["data"] is not None:
        document.set("data.source", flags["data"], "-d")
    _only_one(flags, "dtype", "no_amp", "bf16")
    _only_one(flags, "launcher", "spawn")
    _only_one(flags, "warmup", "warmup_epochs")
    switches = {
        "--no-amp": ("train.precision", "f32"),
        "--bf16": ("train.precision", "bf16"),
        "--spawn": ("devices.launcher", "spawn"),
        "--exact": ("train.exact", True),
        "--compile": ("train.compile", True),
        "--tensorboard": ("track.tensorboard", True),
        "--no-preflight": ("devices.preflight", 0),
    }
    for name, (key, value) in switches.items():
        if flags[name.removeprefix("--").replace("-", "_")]:
            document.set(key, value, name)
    precision = next((name for name in ("dtype", "no_amp", "bf16") if flags[name]), None)
    if precision and "train" in document.value:  # what is typed wins over what amp would choose
        document.set("train.amp", False, f"--{precision.replace('_', '-')}")
    _apply_devices(document, flags["devices"], flags["gpus"], flags["num_gpus"])
    _apply_length(document, flags["epochs"], flags["max_steps"])
    if flags["warmup_epochs"] is not None:
        document.set("schedule.warmup", _epochs(flags["warmup_epochs"]), "--warmup-epochs")


def _apply_devices(
    document: "Document", devices: str | None, gpus: str | None, count: int | None
) -> None:
    values = {"--devices": devices, "--gpus": gpus, "--num-gpus": count}
    names = [name for name, value in values.items() if value is not None]
    if len(names) > 1:
        raise UserError(f"{' and '.join(names)} both name devices", "give one of them", names[0])
    if gpus is not None:
        if gpus.startswith("cpu"):
            raise UserError(f"--gpus {gpus} names no GPU", f"--devices {gpus}", "--gpus")
        document.set("devices.use", gpus, "--gpus")
    if count is not None:
        if count < 0:
            raise UserError(f"--num-gpus {count}", "a number of GPUs, or 0 for all", "--num-gpus")
        document.set("devices.use", ",".join(map(str, range(count))) or "all", "--num-gpus")


def let_devices_win(document: "Document") -> str | None:
    """Several devices that a flag names win over another tool's switch that leaves one.

    Returns what to say of it.
    """
    section = document.value.get("devices", {})
    flag, switch = (document.origins.get(("devices", name), "") for name in ("use", "strategy"))
    several = re.search(r"all|,|cpu:(?!1$)", section.get("use", ""))
    strategy, of_one = (
        section.get("strategy"),
        [row.name for row in STRATEGIES.values() if row.takes_one_device],
    )
    typed = flag.startswith("--") and not switch.startswith("--")
    if not several or not typed or strategy not in of_one:
        return None
    document.set("devices.strategy", "auto", flag)
    return f"{flag} names several devices: it replaces strategy {strategy} ({switch})"


def _apply_length(document: "Document", epochs: float | None, steps: int | None) -> None:
    section = document.value.get("train")
    config_steps = section.get("steps") if isinstance(section, dict) else None
    if epochs is not None and steps:
        raise UserError(
            f"--epochs {epochs:g} and --max-steps {steps} both fix the length",
            "give one of them",
            "--max-steps",
        )
    if epochs is None and steps == 0:
        if str(config_steps).endswith("ep"):
            return  # the config says how many
        raise UserError(
            "--max-steps 0 means whole epochs", "say how many: --epochs N", "--max-steps"
        )
    if epochs is not None:
        document.set("train.steps", _epochs(epochs), "--epochs")
    elif steps is not None:
        document.set("train.steps", steps, "--max-steps")


def _epochs(count: float) -> str:
    return f"{count:.9f}".rstrip("0").rstrip(".") + "ep"


def _only_one(flags: Flags, *parameters: str) -> None:
    used = [name for name in parameters if flags[name] is not None and flags[name] is not False]
    names = [f"--{name.replace('_', '-')}" for name in used]
    if len(names) > 1:
        raise UserError(
            f"{' and '.join(names)} contradict each other", "give one of them", names[0]
        )


def apply_batch(
    document: "Document",
    batch_size: int | None,
    grad_accum: int | None,
    global_batch_size: int | None,
) -> str | None:
    """--batch-size and --grad-accum replace the batch section, or --global-batch fixes the product.

    Returns what to say of it.
    """
    values = {
        "samples": (global_batch_size, "--global-batch"),
        "per_device": (batch_size, "--batch-size"),
        "accumulate": (grad_accum, "--grad-accum"),
    }
    if all(value is None for value, _ in values.values()):
        return None
    section = document.value.get("batch")
    old = section if isinstance(section, dict) else {}
    if global_batch_size is None and batch_size is None and old.get("per_device") is None:
        raise UserError(
            f"--grad-accum {grad_accum} needs a batch per device; the config gives"
            f" {old.get('samples', 'no')} samples over all devices",
            f"--batch-size N --grad-accum {grad_accum}; or leave it out: the plan finds the"
            " accumulation steps",
            "--grad-accum",
        )
    remaining = {}
    if global_batch_size is None:
        remaining = {key: old[key] for key in ("per_device", "accumulate") if key in old}
    places = {key: document.origin_of(("batch", key)) for key in remaining}
    document.set("batch", {}, "flags")
    for key, value in remaining.items():
        document.set(f"batch.{key}", value, places[key])
    for key, (new_value, flag) in values.items():
        if new_value is not None:
            document.set(f"batch.{key}", new_value, flag)
    if global_batch_size is not None or old.get("samples") is None:
        return None
    return (
        f"--batch-size is per device: it replaces the config's {old['samples']} samples over all"
        " devices (--global-batch fixes those)"
    )
