"""Functions that hf_trainer.yaml names."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from samecurve_products.convert.foreign_config import ForeignConfig
from samecurve_products.convert.values import epochs

# conditions on a field's value, and conversions of one, by their names in the table
FUNCTIONS: Mapping[str, Callable[[Any], Any]] = {
    # a share of the data that counts rows
    "number_of_rows": lambda share: isinstance(share, int | float) and share >= 1,
    # an optimizer with moments in eight bits
    "eight_bit": lambda value: "8bit" in str(value).lower(),
}


def part_of_run(value: object) -> bool:
    """Whether a number of steps is a share of the run, as in transformers 5."""
    return isinstance(value, float) and 0 < value < 1


def stage_3(value: object) -> bool:
    """Whether the name of a DeepSpeed file says ZeRO's third stage: the file itself isn't read."""
    stages = ("zero3", "z3", "zero_3", "stage3", "ds3")
    return any(stage in str(value).lower() for stage in stages)


def betas(foreign: ForeignConfig) -> list[object]:
    """AdamW's betas, one of which the file may leave out."""
    return [foreign.value("adam_beta1", 0.9), foreign.value("adam_beta2", 0.999)]


def has_no_warmup(foreign: ForeignConfig) -> bool:
    """Whether the schedule is transformers' constant, which reads no warm-up; its fields are left.

    constant_with_warmup is another schedule.
    """
    words = (foreign.value("lr_scheduler"), foreign.value("lr_scheduler_type"))
    if "constant" not in [str(word).lower() for word in words]:
        return False
    for field in ("warmup_steps", "warmup_ratio"):
        foreign.ignore(field, "a constant schedule has no warm-up; constant_with_warmup has one")
    return True


def warmup(foreign: ForeignConfig) -> None:
    """Read the warm-up: steps, or a share of the run."""
    if has_no_warmup(foreign):
        return
    share_field = "warmup_ratio"
    if part_of_run(foreign.value("warmup_steps")):
        share_field = "warmup_steps"
    elif foreign.value("warmup_steps"):
        foreign.convert("warmup_steps", "schedule.warmup")
        foreign.ignore("warmup_ratio", "warmup_steps is there, and wins")
        return
    else:
        foreign.ignore("warmup_steps", "none")
    share = foreign.value(share_field)
    length = foreign.document.value.get("train", {}).get("steps")
    why = "that share of the run"
    if not share:
        foreign.ignore(share_field, "none")
    elif not isinstance(share, int | float) or isinstance(share, bool):
        foreign.convert(share_field, "schedule.warmup")
    elif isinstance(length, str) and length.endswith("ep"):
        part = epochs(share * float(length.removesuffix("ep")))
        foreign.convert(share_field, "schedule.warmup", part, f"{why}, rounded up to whole steps")
    elif isinstance(length, int):
        foreign.convert(share_field, "schedule.warmup", math.ceil(share * length), why)
