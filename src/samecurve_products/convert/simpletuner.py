"""Functions that simpletuner.yaml names."""

from collections.abc import Callable, Mapping
from typing import Any

from samecurve.seam import Document
from samecurve_products.convert.foreign_config import ForeignConfig
from samecurve_products.convert.host_memory import simpletuner_layers
from samecurve_products.convert.prompts import prompt_of, write_prompts
from samecurve_products.convert.simpletuner_data import data
from samecurve_products.convert.values import as_float

_SERVED = {"sd1x", "sd2x", "sdxl", "sd3", "flux", "z_image"}
_FLOW = {"sd3", "flux", "z_image"}
_SWITCHES = {"true": True, "false": False}

# conditions on a field's value, and conversions of one, by their names in the table
FUNCTIONS: Mapping[str, Callable[[Any], Any]] = {
    "simpletuner_layers": simpletuner_layers,
    "served": lambda family: str(family).lower() in _SERVED,
    "data": data,
    "eight_bits": lambda word: str(word).startswith(("int8", "fp8")),
    "four_bits": lambda word: str(word).startswith(("int4", "nf4", "fp4")),
}

_OPTIMIZERS = {
    "adamw_bf16": "adamw",
    "torch-adamw": "adamw",
    "optimi-adamw": "adamw",
    "bnb-adamw": "adamw",
    "bnb-adamw-paged": "adamw",
    "bnb-adamw8bit": "adamw8bit",
    "bnb-adamw8bit-paged": "adamw8bit",
    "ao-adamw8bit": "adamw8bit",
}


def prepare(document: Document) -> Document:
    """The fields without their `--`, out of the section `config` where there is one.

    Texts of switches and numbers become what they mean, as on a command line.
    """
    inner = document.value.get("config")
    above: tuple[str, ...] = ("config",) if isinstance(inner, dict) else ()
    fields = inner if isinstance(inner, dict) else document.value
    result = Document()
    for name, value in fields.items():
        plain = name.removeprefix("--")
        result.value[plain] = _meaning(plain, value)
        result.origins[(plain,)] = document.origin_of((*above, name))
    return result


def _meaning(name: str, value: object) -> object:
    if not isinstance(value, str) or "prompt" in name or name.endswith(("_name", "_path")):
        return value
    if value.lower() in _SWITCHES:
        return _SWITCHES[value.lower()]
    try:
        number = float(value)
    except ValueError:
        return value
    return int(number) if number.is_integer() and "." not in value else number


def lora(foreign: ForeignConfig) -> None:
    """Read the size of the adapter, and its layers."""
    key = "model.adapter"
    if foreign.value("model_type") is None:
        foreign.add_default(f"{key}.kind", "lora", "an adapter is trained")
    if foreign.value("use_dora") is True:
        foreign.convert("use_dora", f"{key}.kind", "dora")
    mode = foreign.value("peft_lora_mode", "standard")
    if mode != "standard":
        why = "is an adapter that is not here"
        foreign.refuse("peft_lora_mode", why, "standard", f"{key}.kind")
    rank = foreign.value("lora_rank", 16)
    foreign.convert("lora_rank", f"{key}.rank")
    if not foreign.is_set(f"{key}.rank"):
        foreign.add_default(f"{key}.rank", 16, "rank 16")
    alpha = foreign.value("lora_alpha")
    if alpha is None:
        foreign.add_default(f"{key}.alpha", as_float(rank), "alpha is the rank")
    foreign.convert("lora_alpha", f"{key}.alpha", as_float(alpha))
    if foreign.value("lora_dropout") is None:
        foreign.add_default(f"{key}.dropout", 0.1, "an adapter with dropout")
    foreign.convert("lora_dropout", f"{key}.dropout", as_float(foreign.value("lora_dropout")))
    if foreign.value("slider_lora_target") is True:
        foreign.refuse("slider_lora_target", "is another objective", "false", "model")
    named = foreign.value("peft_lora_target_modules")
    layers = named if isinstance(named, list) else ["to_k", "to_q", "to_v", "to_out.0"]
    if str(foreign.value("model_family")) == "flux":
        _check_flux_layers(foreign)
    foreign.convert("peft_lora_target_modules", f"{key}.target", layers)
    if not foreign.is_set(f"{key}.target"):
        foreign.add_default(f"{key}.target", layers, "the products of attention")


def _check_flux_layers(foreign: ForeignConfig) -> None:
    """Refuse a word for layers of Flux: those of `all` are more than the products of attention."""
    field, key = "flux_lora_target", "model.adapter.target"
    if foreign.value("peft_lora_target_modules") is not None:
        return
    remedy = f"--set {key}=attention, or peft_lora_target_modules: [to_q, to_k, ...]"
    why = "is a word for layers that is not here"
    if foreign.value(field) is None:
        foreign.refuse_default(field, "all", why, remedy, key)
    else:
        foreign.refuse(field, why, remedy, key)


def times(foreign: ForeignConfig) -> None:
    """Read the times that a flow model is trained on."""
    key = "model.time_steps"
    fields = (
        *("flow_sigmoid_scale", "flow_use_uniform_schedule", "flow_schedule_shift"),
        *("flow_schedule_auto_shift", "flow_use_beta_schedule", "flux_fast_schedule"),
        *("flow_custom_timesteps", "flow_cubic_schedule_weights"),
    )
    leftover = ("flow_beta_schedule_alpha", "flow_beta_schedule_beta", "flow_timesteps_mode")
    if str(foreign.value("model_family")) not in _FLOW:
        for field in (*fields, *leftover, "audio_flow_schedule_shift"):
            foreign.ignore(field, "of models that learn a flow")
        return
    for field in fields[4:]:
        if foreign.value(field):
            remedy = f"--set {key}.distribution=uniform, or logit_normal"
            why = "draws times in a way that is not here"
            foreign.refuse(field, why, remedy, f"{key}.distribution")
        foreign.ignore(field, "switched off")
    for field in (*leftover, "audio_flow_schedule_shift"):
        foreign.ignore(field, "of what is switched off")
    if foreign.value("flow_use_uniform_schedule") is True:
        foreign.convert("flow_use_uniform_schedule", f"{key}.distribution", "uniform")
        foreign.ignore("flow_sigmoid_scale", "all times are drawn alike")
    else:
        foreign.ignore("flow_use_uniform_schedule", "switched off")
        foreign.add_default(f"{key}.distribution", "logit_normal", "the middle times more often")
        scale = as_float(foreign.value("flow_sigmoid_scale", 1.0))
        foreign.convert("flow_sigmoid_scale", f"{key}.deviation", scale)
    if foreign.value("flow_schedule_auto_shift") is True:
        why = "the scheduler's own, by the size of the picture"
        foreign.convert("flow_schedule_auto_shift", f"{key}.shift", None, why)
        foreign.ignore("flow_schedule_shift", "flow_schedule_auto_shift is on, and wins")
        return
    foreign.ignore("flow_schedule_auto_shift", "switched off")
    shift = foreign.value("flow_schedule_shift")
    if shift is None:
        foreign.add_default(f"{key}.shift", 3.0, "times are shifted by 3")
    foreign.convert("flow_schedule_shift", f"{key}.shift", as_float(shift) or 1.0)


def schedule(foreign: ForeignConfig) -> None:
    """Read the learning rate's schedule."""
    name, key = "lr_scheduler", "schedule.decay"
    word = str(foreign.value(name, "constant_with_warmup"))
    choices = {"constant": "constant", "constant_with_warmup": "constant", "cosine": "cosine"}
    choices["linear"] = "linear"
    if word not in choices:
        remedy = f"--set {key}=cosine, linear or constant"
        foreign.refuse(name, "is a schedule that is not here", remedy, key)
    elif foreign.value(name) is None:
        foreign.add_default(key, "constant", "no decay")
    foreign.convert(name, key, choices.get(word, word))
    foreign.add_default("schedule.final", 0.0, "a decay ends at nothing")
    for field in ("lr_end", "lr_num_cycles", "lr_power"):
        foreign.ignore(field, f"of {name}")
    foreign.ignore("text_encoder_lr", "text encoders are not trained")


def optimizer(foreign: ForeignConfig) -> None:
    """Read the optimizer and its numbers."""
    name, key = "optimizer", "optimizer.name"
    word = str(foreign.value(name, "adamw_bf16"))
    if word in _OPTIMIZERS:
        why = "weights are held in f32 here" if word == "adamw_bf16" else ""
        foreign.convert(name, key, _OPTIMIZERS[word], why)
    else:
        why = "is not computed here, or not as it is there, so the curve would be another"
        remedy = f"--set {key}=adamw, with a learning rate for it"
        foreign.refuse(name, why, remedy, key)
    settings = foreign.value("optimizer_config")
    if settings:
        why = "holds settings of an optimizer there"
        foreign.refuse("optimizer_config", why, "optimizer: in the config", "optimizer")
    foreign.ignore("optimizer_config", "no settings")
    betas = []
    for number, default in ((1, 0.9), (2, 0.999)):
        own = foreign.value(f"optimizer_beta{number}", foreign.value(f"adam_beta{number}", default))
        betas.append(as_float(own))
    values = {"betas": betas, "weight_decay": as_float(foreign.value("adam_weight_decay", 0.01))}
    values["eps"] = as_float(foreign.value("adam_epsilon", 1e-6))
    for field, value in values.items():
        foreign.add_default(f"optimizer.{field}", value, "AdamW's numbers, with those of the file")
    for field in ("optimizer_beta1", "optimizer_beta2", "adam_beta1", "adam_beta2"):
        foreign.note(field, "optimizer.betas")
    foreign.note("adam_weight_decay", "optimizer.weight_decay")
    foreign.note("adam_epsilon", "optimizer.eps")
    foreign.ignore("prodigy_steps", "of another optimizer")


def clip(foreign: ForeignConfig) -> None:
    """Read the clipping: of the gradient's norm, or of each of its numbers."""
    key, limit = "optimizer.clip", as_float(foreign.value("max_grad_norm", 2.0))
    method = foreign.value("grad_clip_method", "value")
    if method == "norm" or not limit:
        foreign.convert("max_grad_norm", key, limit)
        foreign.ignore("grad_clip_method", "as here")
        if not foreign.is_set(key):
            foreign.add_default(key, limit, "gradients clipped at 2")
        return
    remedy = f"--set {key}=1.0 clips the norm; =0 clips nothing"
    why = "clips each number of the gradient; here its norm is clipped"
    if foreign.value("grad_clip_method") is None:
        foreign.refuse_default("grad_clip_method", "value", why, remedy, key)
    else:
        foreign.refuse("grad_clip_method", why, remedy, key)
    foreign.ignore("max_grad_norm", "of grad_clip_method")


def prompts(foreign: ForeignConfig) -> None:
    """Read the prompt of which pictures are shown."""
    names = ("prompt", "negative_prompt", "num_inference_steps", "guidance")
    fields = {name: foreign.value(f"validation_{name}") for name in names}
    prompt = prompt_of(fields, names)
    if prompt is None:
        return
    write_prompts(foreign, [prompt], foreign.place_of("validation_prompt"))
    keys = ("prompts", "negative_prompt", "sample_steps", "guidance")
    for name, key in zip(names, keys, strict=True):
        if foreign.is_set(f"data.{key}"):
            foreign.note(f"validation_{name}", f"data.{key}")
