"""Functions that kohya.yaml names: the adapter, the times, the schedule and the optimizer."""

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any

from samecurve.core.config import EPOCHS_PATTERN
from samecurve.seam import Document
from samecurve_products.convert.foreign_config import ForeignConfig
from samecurve_products.convert.host_memory import kohya_blocks
from samecurve_products.convert.kohya_data import data
from samecurve_products.convert.values import as_float, epochs, number

FUNCTIONS: Mapping[str, Callable[[Any], Any]] = {"data": data, "kohya_blocks": kohya_blocks}

# modules of adapters -> the layers that they change
_LAYERS = {
    "networks.lora": ".*attentions.*",
    "networks.lora_flux": ".*transformer_blocks.*",
    "networks.lora_sd3": ".*transformer_blocks.*",
    "lycoris.kohya": ".*",
}
_FLOW_FIELDS = (
    *("timestep_sampling", "sigmoid_scale", "discrete_flow_shift", "model_prediction_type"),
    *("weighting_scheme", "logit_mean", "logit_std", "mode_scale", "training_shift"),
    "guidance_scale",
)
_SCHEMES = {"uniform", "none", "logit_normal"}
_OPTIMIZERS = {
    "": "adamw",
    "adamw": "adamw",
    "adamw8bit": "adamw8bit",
    "pagedadamw": "adamw",
    "pagedadamw8bit": "adamw8bit",
}
_FROZEN = "text encoders stay as they are here: captions are encoded once, before the first step"


def prepare(document: Document) -> Document:
    """The document without its sections, which have no meaning, but those of data sets."""
    result = Document()
    for name, item in document.value.items():
        is_of_data = name == "general" and "datasets" in document.value
        fields = item if isinstance(item, dict) and not is_of_data else {name: item}
        result.value.update(fields)
    for key, place in document.origins.items():
        if key[0] in result.value:
            result.origins.setdefault(key, place)
        elif len(key) > 1 and key[1] in result.value:
            result.origins.setdefault(key[1:], place)
    return result


def adapter(foreign: ForeignConfig) -> None:
    """Read the adapter: its kind, its size and its layers."""
    if foreign.value("network_module") is None:
        return
    key, module = "model.adapter", str(foreign.value("network_module"))
    if module not in _LAYERS:
        known = ", ".join(_LAYERS)
        foreign.refuse("network_module", "is an adapter that is not here", known, f"{key}.kind")
    kind, fault = _kind(foreign.value("network_args"), is_lycoris=module == "lycoris.kohya")
    if fault:
        remedy = "take it out of the file to train without"
        foreign.refuse("network_args", fault, remedy, f"{key}.kind")
    foreign.ignore("network_args", f"kind {kind}")
    foreign.convert("network_module", f"{key}.kind", kind)
    target = _LAYERS.get(module, ".*")
    foreign.add_default(f"{key}.target", target, "the layers of this module")
    for field, name, default in (("network_dim", "rank", 4), ("network_alpha", "alpha", 1.0)):
        value = foreign.value(field)
        if value is None:
            foreign.add_default(f"{key}.{name}", default, f"{name} {default:g}")
        else:
            read = as_float(value) if name == "alpha" else value
            foreign.convert(field, f"{key}.{name}", read)
    foreign.convert("network_dropout", f"{key}.dropout", number(foreign.value("network_dropout")))


def _kind(arguments: object, *, is_lycoris: bool) -> tuple[str, str]:
    """The kind of adapter that arguments mean, and what of them is not served, or ''."""
    fields = arguments_of(arguments)
    algorithm = str(fields.pop("algo", "lora" if not is_lycoris else "locon")).lower()
    is_dora = fields.pop("dora_wd", False) is True
    for name in ("conv_dim", "conv_alpha", "preset", "factor"):
        if fields.get(name) in (None, 0, "full", -1):
            fields.pop(name, None)
    kinds = {"lora": "lora", "lokr": "lokr"}
    if algorithm not in kinds:
        return "lora", f"asks for {algorithm}, an adapter that is not here"
    if fields:
        return "lora", f"asks for {', '.join(fields)}, which is not served"
    return ("dora" if is_dora and algorithm == "lora" else kinds[algorithm]), ""


def arguments_of(arguments: object) -> dict[str, object]:
    """`["weight_decay=0.01", "betas=0.9,0.99"]` -> names and values."""
    fields: dict[str, object] = {}
    for item in arguments if isinstance(arguments, list) else []:
        name, _, text = str(item).partition("=")
        try:
            fields[name.strip()] = ast.literal_eval(text.strip())
        except (ValueError, SyntaxError):
            fields[name.strip()] = text.strip()
    return fields


def text_encoders(foreign: ForeignConfig) -> None:
    """Refuse that an adapter of text encoders is trained, which is so where no field says no."""
    field, key = "network_train_unet_only", "model"
    if foreign.value("network_module") is None:
        return
    cached = foreign.value("cache_text_encoder_outputs") is True
    remedy = "network_train_unet_only = true trains the denoiser alone"
    if foreign.value(field) is True or cached:
        foreign.ignore(field, "as here")
    elif foreign.value(field) is None:
        foreign.refuse_default(field, False, _FROZEN, remedy, key)
    else:
        foreign.refuse(field, f"trains text encoders too: {_FROZEN}", remedy, key)
    foreign.ignore("cache_text_encoder_outputs", "latents and captions are encoded once, and kept")


def times(foreign: ForeignConfig) -> None:
    """Read the times that a flow model is trained on."""
    if all(foreign.value(field) is None for field in _FLOW_FIELDS):
        return
    _check_prediction(foreign)
    key = "model.time_steps"
    sampling = str(foreign.value("timestep_sampling", "sigma"))
    shift = as_float(foreign.value("discrete_flow_shift", 3.0))
    if foreign.value("network_module") == "networks.lora_sd3":
        sampling, shift = "sigma", as_float(foreign.value("training_shift", 1.0))
    values: dict[str, object] = {"distribution": "uniform", "shift": shift}
    scheme = str(foreign.value("weighting_scheme", "uniform"))
    is_sigma = sampling == "sigma"
    if sampling in {"sigmoid", "uniform"}:
        values["shift"] = 1.0
    elif sampling == "flux_shift":  # by the size of the picture, as the scheduler has it
        values["shift"] = None
    elif (is_sigma and scheme not in _SCHEMES) or (not is_sigma and sampling != "shift"):
        field = "weighting_scheme" if is_sigma else "timestep_sampling"
        remedy = f"--set {key}.distribution=uniform, or logit_normal"
        foreign.refuse(field, "is a distribution that is not here", remedy, f"{key}.distribution")
    if sampling in {"sigmoid", "shift", "flux_shift"} or (is_sigma and scheme == "logit_normal"):
        spread = foreign.value("logit_std" if is_sigma else "sigmoid_scale", 1.0)
        mean = foreign.value("logit_mean", 0.0) if is_sigma else 0.0
        values |= {"distribution": "logit_normal"}
        values |= {"deviation": as_float(spread), "mean": as_float(mean)}
    text = ", ".join(f"{name} {value}" for name, value in values.items())
    for name, value in values.items():
        foreign.document.set(f"{key}.{name}", value, foreign.place_of("timestep_sampling") or "-")
    for field in _FLOW_FIELDS:
        foreign.note(field, f"{key}: {text}")


def _check_prediction(foreign: ForeignConfig) -> None:
    """Refuse a loss that is weighed by the time, and a guidance other than 1, while it trains."""
    remedy = 'model_prediction_type = "raw"'
    why = "weighs times in a way that is not here"
    if foreign.value("network_module") == "networks.lora_sd3":
        return
    if foreign.value("model_prediction_type") is None:
        foreign.refuse_default("model_prediction_type", "sigma_scaled", why, remedy, "model")
    elif foreign.value("model_prediction_type") != "raw":
        foreign.refuse("model_prediction_type", why, remedy, "model")
    why, remedy = "trains at another guidance than 1", "guidance_scale = 1.0"
    if foreign.value("guidance_scale") is None:
        foreign.refuse_default("guidance_scale", 3.5, why, remedy, "model")
    elif foreign.value("guidance_scale") != 1:
        foreign.refuse("guidance_scale", why, remedy, "model")


def schedule(foreign: ForeignConfig) -> None:
    """Read the learning rate's schedule and its warm-up."""
    name, key = "lr_scheduler", "schedule.decay"
    word = str(foreign.value(name, "constant"))
    decays = {
        "constant": "constant",
        "constant_with_warmup": "constant",
        "linear": "linear",
        "cosine": "cosine",
        "cosine_with_min_lr": "cosine",
    }
    if foreign.value("lr_scheduler_num_cycles", 1) == 1:
        decays["cosine_with_restarts"] = "cosine"
    if foreign.value("lr_scheduler_power", 1) == 1:
        decays["polynomial"] = "linear"
    if foreign.value(name) is None:
        foreign.add_default(key, "constant", "no decay")
    elif word in decays:
        foreign.convert(name, key, decays[word])
    else:
        remedy = f"--set {key}=cosine, linear or constant"
        foreign.refuse(name, "is a schedule that is not here", remedy, key)
    if word == "cosine_with_min_lr":
        foreign.convert("lr_scheduler_min_lr_ratio", "schedule.final")
    elif word != "constant":
        foreign.add_default("schedule.final", 0.0, "a decay ends at nothing")
    for field in ("lr_scheduler_type", "lr_scheduler_args", "lr_decay_steps"):
        if foreign.value(field):
            foreign.refuse(field, "is a schedule of its own", f"--set {key}=cosine", key)
        foreign.ignore(field, "switched off")
    for field in ("num_cycles", "power", "timescale", "min_lr_ratio"):
        foreign.ignore(f"lr_scheduler_{field}", f"of {name}")
    warmup(foreign)


def warmup(foreign: ForeignConfig) -> None:
    """Read the warm-up: steps, or a share of the run."""
    name, key = "lr_warmup_steps", "schedule.warmup"
    share = foreign.value(name)
    length = foreign.document.value.get("train", {}).get("steps")
    if not isinstance(share, float) or not 0 < share < 1:
        is_whole = isinstance(share, float) and share.is_integer()
        foreign.convert(name, key, int(share) if is_whole and isinstance(share, float) else share)
    elif isinstance(length, int):
        foreign.convert(name, key, int(share * length), "that share of the run")
    elif isinstance(length, str) and re.fullmatch(EPOCHS_PATTERN, length):
        count = float(length.removesuffix("ep"))
        foreign.convert(name, key, epochs(share * count), "that share of the run")


def optimizer(foreign: ForeignConfig) -> None:
    """Read the optimizer and its arguments."""
    name, key = "optimizer_type", "optimizer.name"
    word = str(foreign.value(name, "")).lower()
    if foreign.value("use_8bit_adam") is True and not word:
        foreign.convert("use_8bit_adam", key, "adamw8bit")
    elif word in _OPTIMIZERS:
        foreign.convert(name, key, _OPTIMIZERS[word])
    else:
        why = "is not computed here, or not as it is there, so the curve would be another"
        remedy = f"--set {key}=adamw, or adamw8bit, with a learning rate for it"
        foreign.refuse(name, why, remedy, key)
    for field in ("use_8bit_adam", "use_lion_optimizer", "optimizer_schedulefree_wrapper"):
        if foreign.value(field):
            foreign.refuse(field, "is another optimizer", f"--set {key}=adamw", key)
        foreign.ignore(field, "switched off")
    foreign.ignore("schedulefree_wrapper_args", "of another optimizer")
    fields = arguments_of(foreign.value("optimizer_args"))
    betas = fields.pop("betas", (0.9, 0.999))
    values = {
        "optimizer.weight_decay": fields.pop("weight_decay", 0.01),
        "optimizer.betas": list(betas) if isinstance(betas, tuple) else betas,
    }
    if "eps" in fields:
        values["optimizer.eps"] = fields.pop("eps")
    if fields and word in _OPTIMIZERS:
        why = f"has {', '.join(fields)}, which the optimizer here does not have"
        foreign.refuse("optimizer_args", why, "take it out of the file", "optimizer")
    for field, value in values.items():
        foreign.add_default(field, value, "AdamW's numbers, with those of optimizer_args")
    foreign.note("optimizer_args", "optimizer.weight_decay, betas and eps")
