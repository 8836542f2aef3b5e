"""What configs over transformers' Trainer have in common, whatever they call it.

There, a batch is per device and round, warm-up and saving count optimizer steps, weight decay is 0,
clipping at a norm of 1, and a decay ends at nothing, if no field says otherwise.
"""

import math
from collections.abc import Mapping

from samecurve.convert.foreign_fields import ForeignConfig, Table, epochs

_OPTIMIZERS: Table = {
    **dict.fromkeys(
        ("ADAMW_TORCH", "ADAMW_TORCH_FUSED", "ADAMW_HF", "ADAMW_APEX_FUSED", "ADAMW"), "adamw"
    ),
    **dict.fromkeys(("ADAMW_8BIT", "ADAMW_BNB_8BIT"), "adamw8bit"),
    "SGD": "sgd",
}
_DECAYS: Table = {
    "COSINE": "cosine",
    "LINEAR": "linear",
    "CONSTANT": "constant",
    "CONSTANT_WITH_WARMUP": "constant",
    "COSINE_WITH_MIN_LR": "cosine",
}
_NEVER: Table = {"NO": "0", "EPOCH": "1ep"}


def refuse_switched_on(foreign: ForeignConfig, reasons: Mapping[str, tuple[str, str]]) -> None:
    """Fields that change what is trained, if they are on. field -> (reason, remedy)"""
    for field, (reason, remedy) in reasons.items():
        if foreign.value(field) in (None, False, 0, "", [], {}):
            foreign.ignore(field, "switched off")
        else:
            foreign.refuse(field, reason, remedy)


def ignore_all(foreign: ForeignConfig, reasons: Mapping[str, tuple[str, ...]]) -> None:
    """reason -> fields"""
    for reason, fields in reasons.items():
        for field in fields:
            foreign.ignore(field, reason)


def convert_number(foreign: ForeignConfig, field: str, key: str, why: str = "") -> None:
    """2e-5 without a point is a text in YAML, and those tools read it as a number all the same."""
    value = foreign.value(field)
    try:
        number = float(value) if isinstance(value, str) else None
    except ValueError:
        number = None
    if number is None:
        foreign.convert(field, key, why=why)
    else:
        foreign.convert(field, key, number, why)


def convert_length(foreign: ForeignConfig, epochs_field: str, default: float) -> None:
    """max_steps, where it is positive, else epochs."""
    steps = foreign.value("max_steps")
    if isinstance(steps, int) and steps > 0:
        foreign.convert("max_steps", "train.steps")
        foreign.ignore(epochs_field, "max_steps says how long the run is")
        return
    foreign.ignore("max_steps", "whole epochs")
    count = foreign.value(epochs_field)
    if count is None:
        foreign.ignore(epochs_field, "as if it were not there")
        foreign.add_default("train.steps", epochs(default), f"epochs {default:g}")
    else:
        foreign.convert(epochs_field, "train.steps", epochs(count))


def convert_held_out(foreign: ForeignConfig, field: str) -> None:
    """A share of the data, which stays out of training."""
    share = foreign.value(field, 0.0)
    if isinstance(share, int | float) and share >= 1:
        foreign.refuse(
            field,
            "counts rows; here it is a share",
            "--set data.validation=0.02",
            "data.validation",
        )
    foreign.convert(field, "data.validation", why="a share of tokens here")
    if foreign.value(field) is None:
        foreign.add_default("data.validation", 0.0, "nothing held out")


def convert_warmup(foreign: ForeignConfig) -> None:
    """Steps, or a share of the run."""
    steps = foreign.value("warmup_steps")
    if isinstance(steps, float) and 0 < steps < 1:  # a share, since transformers 5
        share_field = "warmup_steps"
    elif steps:
        foreign.convert("warmup_steps", "schedule.warmup")
        foreign.ignore("warmup_ratio", "warmup_steps is there, and wins")
        return
    else:
        foreign.ignore("warmup_steps", "none")
        share_field = "warmup_ratio"
    share = foreign.value(share_field)
    length = foreign.document.value.get("train", {}).get("steps")
    if not share:
        foreign.ignore(share_field, "none")
    elif not isinstance(share, int | float) or isinstance(share, bool):
        foreign.convert(share_field, "schedule.warmup")
    elif isinstance(length, str) and length.endswith("ep"):
        part = epochs(share * float(length.removesuffix("ep")))
        foreign.convert(share_field, "schedule.warmup", part, "that share of the run")
    elif isinstance(length, int):
        steps = math.ceil(share * length)
        foreign.convert(share_field, "schedule.warmup", steps, "that share of the run")


def convert_optimizer(foreign: ForeignConfig, field: str, rate: float | None) -> None:
    """Its kind and its numbers. rate: the default; None: there is none"""
    why = ""
    if "8bit" in str(foreign.value(field)).lower():
        why = "moments of eight bits, in blocks of this program"
    foreign.convert_by_table(
        field,
        "optimizer.name",
        _OPTIMIZERS,
        "--set optimizer.name=adamw, sgd or adamw8bit; adafactor and muon have other formulas here",
        why,
    )
    convert_number(foreign, "learning_rate", "optimizer.lr")
    if foreign.value("learning_rate") is None and rate:
        foreign.add_default("optimizer.lr", rate, "its default rate")
    convert_number(foreign, "weight_decay", "optimizer.weight_decay", "here on matrices only")
    if foreign.value("weight_decay") is None:
        foreign.add_default("optimizer.weight_decay", 0.0, "no weight decay")
    betas = [foreign.value("adam_beta1", 0.9), foreign.value("adam_beta2", 0.999)]
    for name in ("adam_beta1", "adam_beta2"):
        foreign.convert(name, "optimizer.betas", betas)
    if foreign.value("adam_beta1") is None and foreign.value("adam_beta2") is None:
        foreign.add_default("optimizer.betas", betas, "AdamW's betas")
    convert_number(foreign, "adam_epsilon", "optimizer.eps")
    convert_number(foreign, "max_grad_norm", "optimizer.clip")
    if foreign.value("max_grad_norm") is None:
        foreign.add_default("optimizer.clip", 1.0, "gradients clipped at 1")


def convert_decay(foreign: ForeignConfig, field: str, default: str) -> None:
    foreign.convert_by_table(
        field, "schedule.decay", _DECAYS, "--set schedule.decay=cosine, linear or constant"
    )
    if foreign.value(field) is None:
        foreign.add_default("schedule.decay", default, f"a {default} decay")
    if foreign.value("cosine_min_lr_ratio") is not None:
        convert_number(foreign, "cosine_min_lr_ratio", "schedule.final")
    else:
        foreign.add_default("schedule.final", 0.0, "a decay ends at nothing")


def convert_precision(foreign: ForeignConfig) -> None:
    """bf16, fp16: at most one of them is on."""
    why = "where the GPU has it, there" if foreign.value("bf16") == "auto" else ""
    if foreign.value("bf16") in (True, "auto", "full"):
        foreign.convert("bf16", "train.precision", "bf16", why)
        foreign.ignore("fp16", "switched off")
    elif foreign.value("fp16") is True:
        foreign.convert("fp16", "train.precision", "f16")
        foreign.ignore("bf16", "switched off")
    else:
        for field in ("bf16", "fp16"):
            foreign.ignore(field, "switched off")
    if "precision" in foreign.document.value.get("train", {}):
        foreign.ignore("tf32", "products are in two bytes")
    refuse_switched_on(
        foreign, {"tf32": ("is not served: products of f32 have all their bits", "--dtype bf16")}
    )


def convert_intervals(foreign: ForeignConfig, kind: str, every: str) -> None:
    """Of saving or of evaluating. kind: save, eval; every: the key"""
    strategy = f"{kind}_strategy"
    word = str(foreign.value(strategy, "")).upper()
    if word in _NEVER:
        value = _NEVER[word]
        foreign.convert(strategy, every, 0 if value == "0" else value)
        foreign.ignore(f"{kind}_steps", f"{strategy} says when")
        return
    foreign.ignore(strategy, f"{kind}_steps says how often")
    steps = foreign.value(f"{kind}_steps")
    if isinstance(steps, float) and 0 < steps < 1:
        foreign.refuse(
            f"{kind}_steps", "is a share of the run", f"--set {every}=N, in steps or epochs", every
        )
    else:
        foreign.convert(f"{kind}_steps", every)


def convert_deepspeed(foreign: ForeignConfig) -> None:
    """A file is only named here: core reads none but the config."""
    name = str(foreign.value("deepspeed", "")).lower()
    if any(stage in name for stage in ("zero3", "z3", "zero_3", "stage3", "ds3")):
        why = "as ZeRO's third stage; nothing else of that file is read"
        foreign.convert("deepspeed", "devices.strategy", "fsdp", why)
    elif isinstance(foreign.value("deepspeed"), dict):
        foreign.refuse(
            "deepspeed", "holds settings of DeepSpeed's own", "--strategy fsdp", "devices.strategy"
        )
    else:
        foreign.ignore(
            "deepspeed",
            "how a model lies on devices changes no result here; --strategy fsdp shards",
        )
