"""Functions that onetrainer.yaml names."""

from collections.abc import Callable, Mapping
from typing import Any

from samecurve.convert.foreign_config import ForeignConfig
from samecurve.convert.values import epochs

# conditions on a field's value, and conversions of one, by their names in the table
FUNCTIONS: Mapping[str, Callable[[Any], Any]] = {
    "not_switch": lambda value: not isinstance(value, bool),  # neither true nor false
    # a GPU; it is one where the file names none
    "cuda": lambda value: (
        value is None or (isinstance(value, str) and value.lower().startswith("cuda"))
    ),
    # an average of the weights is kept
    "averaged": lambda value: value is not None and str(value).upper() != "OFF",
    # it shares no more than its name with ours
    "other_formulas": lambda name: str(name).lower() in {"adafactor", "muon"},
    "lower": lambda value: str(value).lower(),  # in small letters
}

_DEFAULT_RATE = 3e-6  # where the file gives no learning rate


def betas(foreign: ForeignConfig) -> list[object]:
    """AdamW's betas, one of which the file may leave out."""
    return [foreign.value("optimizer.beta1", 0.9), foreign.value("optimizer.beta2", 0.999)]


def old_betas(foreign: ForeignConfig) -> list[object]:
    """AdamW's betas in an older file, one of which it may leave out."""
    return [foreign.value("optimizer_beta1", 0.9), foreign.value("optimizer_beta2", 0.999)]


def scale_rate(foreign: ForeignConfig) -> None:
    """Scale the learning rate by the square root of a number of samples, as upstream does.

    Numbers of one device's share are in the file, so their root goes into the rate, once, whatever
    the devices are. Global numbers count the devices: the plan scales by the global batch.
    """
    rounds = foreign.value("gradient_accumulation_steps", 1)
    each = foreign.value("batch_size", 1)
    rate = foreign.value("learning_rate", _DEFAULT_RATE)
    both = each * rounds if isinstance(each, int) and isinstance(rounds, int) else None
    factors = {"BATCH": each, "GRADIENT_ACCUMULATION": rounds, "BOTH": both}
    scaler = str(foreign.value("learning_rate_scaler", "NONE")).upper()
    factor = factors.get(scaler)
    if isinstance(factor, int) and isinstance(rate, int | float):
        why = f"x the root of {factor}, as learning_rate_scaler says"
        if foreign.value("learning_rate") is None:
            default = f"its default rate {rate:g} {why}"
            foreign.add_default("optimizer.lr", rate * factor**0.5, default)
        foreign.convert("learning_rate", "optimizer.lr", rate * factor**0.5, why)
        foreign.ignore("learning_rate_scaler", "done: the learning rate is scaled already")
    elif scaler in {"GLOBAL_BATCH", "GLOBAL_BOTH"}:
        base = rounds if scaler == "GLOBAL_BATCH" else 1
        foreign.document.set("schedule.base_batch", base, "as learning_rate_scaler says")
        why = f"against a batch of {base}"
        foreign.convert("learning_rate_scaler", "schedule.scale_lr", "sqrt", why)


def warmup(foreign: ForeignConfig) -> None:
    """Read the warm-up: a share of the run, or batches."""
    name, key = "learning_rate_warmup_steps", "schedule.warmup"
    share, length = foreign.value(name), foreign.value("epochs", 100)
    if isinstance(share, int | float) and 0 < share <= 1 and isinstance(length, int | float):
        foreign.convert(name, key, epochs(share * length), f"that share of {length} epochs")
    _convert_batches(foreign, name, key)


def default_warmup(foreign: ForeignConfig) -> object:
    """The optimizer steps of the warm-up where the file says nothing."""
    return _optimizer_steps(foreign, 200)


def save_after(foreign: ForeignConfig) -> None:
    """Read how often a run saves."""
    _convert_interval(foreign, "backup_after", "train.save_every")


def evaluate_after(foreign: ForeignConfig) -> None:
    """Read how often a run evaluates."""
    _convert_interval(foreign, "validate_after", "train.eval_every")


def _convert_interval(foreign: ForeignConfig, name: str, key: str) -> None:
    """Steps or epochs; an interval by the clock is left out."""
    unit = str(foreign.value(f"{name}_unit", "EPOCH")).upper()
    if unit == "STEP":
        _convert_batches(foreign, name, key)
    elif unit == "EPOCH":
        foreign.convert(name, key, epochs(foreign.value(name)))


def _convert_batches(foreign: ForeignConfig, name: str, key: str) -> None:
    rounds = foreign.value("gradient_accumulation_steps", 1)
    why = "" if rounds == 1 else f"batches / gradient_accumulation_steps {rounds}"
    foreign.convert(name, key, _optimizer_steps(foreign, foreign.value(name)), why)


def _optimizer_steps(foreign: ForeignConfig, batches: object) -> object:
    """The optimizer steps of so many batches. Other values than numbers stay as they are."""
    rounds = foreign.value("gradient_accumulation_steps", 1)
    if isinstance(batches, bool) or not isinstance(batches, int | float):
        return batches
    if not isinstance(rounds, int) or rounds <= 0:
        return batches
    return int(batches // rounds)
