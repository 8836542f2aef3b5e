"""Functions that onetrainer.yaml names."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from samecurve_products.convert.foreign_config import ForeignConfig
from samecurve_products.convert.host_memory import onetrainer_layers
from samecurve_products.convert.onetrainer_concepts import concepts, samples
from samecurve_products.convert.onetrainer_model import (
    flows,
    layers,
    of_transformer,
    of_unet,
    served,
    text_encoders,
)
from samecurve_products.convert.values import epochs

_MINUTES = {"SECOND": 1 / 60, "MINUTE": 1, "HOUR": 60}

# conditions on a field's value, and conversions of one, by their names in the table
FUNCTIONS: Mapping[str, Callable[[Any], Any]] = {
    "onetrainer_layers": onetrainer_layers,
    "not_switch": lambda value: not isinstance(value, bool),  # neither true nor false
    # a GPU; it is one where the file names none
    "cuda": lambda value: (
        value is None or (isinstance(value, str) and value.lower().startswith("cuda"))
    ),
    # an average of the weights is kept
    "averaged": lambda value: value is not None and str(value).upper() != "OFF",
    # a unit of time, and not NEVER
    "a_unit": lambda value: value is not None and str(value).upper() != "NEVER",
    # an optimizer that is computed here as it is there
    "ours": lambda name: str(name).upper() in {"ADAMW", "SGD"},
    "served": served,
    "of_unet": of_unet,
    "of_transformer": of_transformer,
    "text_encoders": text_encoders,
    "layers": layers,
    "concepts": concepts,
    "samples": samples,
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
    """Read the learning rate: that of the part that is trained, where it has its own.

    It is scaled by the square root of a number of samples where the file says so, as upstream does.
    Numbers of one device's share are in the file, so their root goes into the rate, once, whatever
    the devices are. Global numbers count the devices: the plan scales by the global batch.
    """
    rounds = foreign.value("gradient_accumulation_steps", 1)
    each = foreign.value("batch_size", 1)
    part = "unet" if of_unet(foreign.value("model_type")) else "transformer"
    own = f"{part}.learning_rate"
    field = "learning_rate" if foreign.value(own) is None else own
    rate = foreign.value(field, _DEFAULT_RATE)
    both = each * rounds if isinstance(each, int) and isinstance(rounds, int) else None
    factors = {"BATCH": each, "GRADIENT_ACCUMULATION": rounds, "BOTH": both}
    scaler = str(foreign.value("learning_rate_scaler", "NONE")).upper()
    factor = factors.get(scaler)
    if isinstance(factor, int) and isinstance(rate, int | float):
        why = f"x the root of {factor}, as learning_rate_scaler says"
        if foreign.value(field) is None:
            default = f"its default rate {rate:g} {why}"
            foreign.add_default("optimizer.lr", rate * factor**0.5, default)
        foreign.convert(field, "optimizer.lr", rate * factor**0.5, why)
        foreign.ignore("learning_rate_scaler", "done: the learning rate is scaled already")
    elif scaler in {"GLOBAL_BATCH", "GLOBAL_BOTH"}:
        base = rounds if scaler == "GLOBAL_BATCH" else 1
        foreign.document.set("schedule.base_batch", base, "as learning_rate_scaler says")
        why = f"against a batch of {base}"
        foreign.convert("learning_rate_scaler", "schedule.scale_lr", "sqrt", why)
    if field == own:
        foreign.convert(own, "optimizer.lr")
        foreign.ignore("learning_rate", f"{own} is there, and wins")


def time_steps(foreign: ForeignConfig) -> None:
    """Read which times are trained on, and their shift."""
    key, name = "model.time_steps", "timestep_distribution"
    word = str(foreign.value(name, "UNIFORM")).upper()
    weight, bias = foreign.value("noising_weight", 0.0), foreign.value("noising_bias", 0.0)
    is_even = word == "UNIFORM" or (word in {"SIGMOID", "HEAVY_TAIL"} and not weight)
    if is_even:
        foreign.convert(name, f"{key}.distribution", "uniform")
        for field in ("noising_weight", "noising_bias"):
            foreign.ignore(field, "all times are drawn alike")
    elif word == "LOGIT_NORMAL" and isinstance(weight, int | float):
        foreign.convert(name, f"{key}.distribution", "logit_normal")
        foreign.convert("noising_weight", f"{key}.deviation", weight + 1.0, "1 more, there")
        foreign.convert("noising_bias", f"{key}.mean", bias)
    else:
        remedy = f"--set {key}.distribution=uniform, or logit_normal"
        foreign.refuse(name, "is a distribution that is not here", remedy, f"{key}.distribution")
        for field in ("noising_weight", "noising_bias"):
            foreign.ignore(field, f"of {name}")
    for field, whole in (("min_noising_strength", 0.0), ("max_noising_strength", 1.0)):
        if foreign.value(field, whole) == whole:
            foreign.ignore(field, "all times are trained on")
        else:
            why = "leaves out some times; here all are trained on"
            foreign.refuse(field, why, f"{whole}", "model.time_steps")
    _shift(foreign)


def _shift(foreign: ForeignConfig) -> None:
    """Read the shift of the times: of flow models, 1 where the file is silent."""
    key, name, dynamic = "model.time_steps.shift", "timestep_shift", "dynamic_timestep_shifting"
    if not flows(foreign.value("model_type")):
        if foreign.value(name, 1.0) == 1.0:
            foreign.ignore(name, "none, as here")
        foreign.refuse(name, "shifts times of a model that learns no flow", "1.0", "model")
        foreign.ignore(dynamic, "of models that learn a flow")
    elif foreign.value(dynamic):
        why = "the scheduler's own, by the size of the picture"
        foreign.convert(dynamic, key, None, why)
        foreign.ignore(name, f"{dynamic} is on, and wins")
    else:
        foreign.ignore(dynamic, "switched off")
        foreign.convert(name, key)
        if not foreign.is_set(key):
            foreign.add_default(key, 1.0, "times are not shifted")


def resolution(foreign: ForeignConfig) -> None:
    """Read the resolution: one number, the side of a square."""
    name, key = "resolution", "data.resolution"
    text = str(foreign.value(name, "512")).strip()
    if re.fullmatch(r"\d+", text):
        foreign.convert(name, key, int(text))
    elif re.fullmatch(r"(\d+)x\1", text):
        foreign.convert(name, key, int(text.partition("x")[0]))
    else:
        why = "is several resolutions, or no square"
        foreign.refuse(name, why, f"--set {key}=1024, or a run for each", key)
    if foreign.value(name) is None:
        foreign.add_default(key, 512, "512 pixels")


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
    _convert_interval(foreign, "backup_after", "train.save_every", default="MINUTE")


def evaluate_after(foreign: ForeignConfig) -> None:
    """Read how often a run evaluates."""
    _convert_interval(foreign, "validate_after", "train.eval_every", default="EPOCH")


def sample_after(foreign: ForeignConfig) -> None:
    """Read how often pictures are shown."""
    _convert_interval(foreign, "sample_after", "train.sample_every", default="MINUTE")


def _convert_interval(foreign: ForeignConfig, name: str, key: str, default: str) -> None:
    """Steps or epochs; saves may go by the clock, other intervals by the clock are left out.

    default: the unit, where the file has none
    """
    unit = str(foreign.value(f"{name}_unit", default)).upper()
    value = foreign.value(name)
    if unit == "STEP":
        _convert_batches(foreign, name, key)
    elif unit == "EPOCH":
        foreign.convert(name, key, epochs(value))
    elif unit in _MINUTES and key == "train.save_every" and isinstance(value, int | float):
        foreign.convert(name, key, f"{value * _MINUTES[unit]:.9g}min")


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
