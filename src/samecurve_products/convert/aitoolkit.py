"""Functions that aitoolkit.yaml names."""

from collections.abc import Callable, Mapping
from typing import Any

from samecurve.seam import Document
from samecurve_products.convert.aitoolkit_data import data, prompts
from samecurve_products.convert.foreign_config import ForeignConfig
from samecurve_products.convert.host_memory import aitoolkit_layers
from samecurve_products.convert.values import as_float, is_number

# conditions on a field's value, and conversions of one, by their names in the table
FUNCTIONS: Mapping[str, Callable[[Any], Any]] = {
    "aitoolkit_layers": aitoolkit_layers,
    "above_1": lambda value: is_number(value) and value > 1,
    "data": data,
    "prompts": prompts,
}

_UNETS = {"sd1", "sd15", "sd2", "sdxl", "ssd", "vega"}  # models whose denoiser is a unet
_OF_UNETS = ".*(attentions|time_emb_proj|time_embedding|add_embedding|conv_shortcut).*"
_LAYERS = {  # those that an adapter changes, where the file does not say `all_layers`
    **dict.fromkeys(_UNETS, _OF_UNETS),
    "sd3": ".*transformer_blocks.*",
    "flux": ".*transformer_blocks.*",
    "zimage": ".*layers.*",
}
_SERVED = {"sd1", "sd15", "sd2", "sdxl", "sd3", "flux", "zimage"}
_SWITCHES = {  # older switches for the kind of a model
    "is_xl": "sdxl",
    "is_v2": "sd2",
    "is_v3": "sd3",
    "is_flux": "flux",
    "is_pixart": "pixart",
    "is_pixart_sigma": "pixart",
    "is_auraflow": "auraflow",
    "is_lumina2": "lumina2",
    "is_ssd": "ssd",
    "is_vega": "vega",
}


def prepare(document: Document) -> Document:
    """The fields of the file's one process, by their names within it."""
    config = document.value.get("config")
    processes = config.get("process") if isinstance(config, dict) else None
    first = processes[0] if isinstance(processes, list) and processes else {}
    above = ("config", "process", 0)
    result = Document(dict(first) if isinstance(first, dict) else {})
    result.value |= {"name": config.get("name")} if isinstance(config, dict) else {}
    result.value |= {"meta": document.value["meta"]} if "meta" in document.value else {}
    if isinstance(processes, list) and len(processes) > 1:
        result.value["processes"] = len(processes)
    for key, place in document.origins.items():
        if key[:3] == above and len(key) > 3:
            result.origins[key[3:]] = place
        elif key in {("meta",), ("config", "name"), ("config", "process")}:
            result.origins[("processes",) if key[-1] == "process" else key[-1:]] = place
    return result


def arch(foreign: ForeignConfig) -> None:
    """Refuse a kind of model that task diffusion does not train."""
    kind = _kind(foreign)
    if kind is None or kind in _SERVED:
        return
    remedy = "task: FILE.py:CLASS, a class of your own (docs/tasks.md)"
    for field in ("arch", *_SWITCHES):
        if foreign.value(f"model.{field}"):
            why = "is of a kind that task diffusion does not train"
            foreign.refuse(f"model.{field}", why, remedy, "task")


def _kind(foreign: ForeignConfig) -> str | None:
    """The kind of model; None: the file does not say."""
    word = foreign.value("model.arch")
    if word:
        return str(word).partition(":")[0].lower()
    return next(
        (kind for field, kind in _SWITCHES.items() if foreign.value(f"model.{field}") is True), None
    )


def network(foreign: ForeignConfig) -> None:
    """Read the adapter; without a `network` all weights are trained."""
    if not foreign.open_fields("network."):
        foreign.ignore("network", "all weights are trained")
        return
    key, kind = "model.adapter", str(foreign.value("network.type", "lora")).lower()
    is_full = foreign.value("network.lokr_full_rank", True) is not False
    if kind == "lokr" and is_full:
        why = "takes matrices of full rank, where lokr_full_rank is not false"
        foreign.refuse("network.type", why, "lokr_full_rank: false", f"{key}.kind")
    elif kind not in {"lora", "lokr"}:
        foreign.refuse("network.type", "is an adapter that is not here", "lora", f"{key}.kind")
    foreign.convert("network.type", f"{key}.kind", kind)
    foreign.document.value.setdefault("model", {}).setdefault("adapter", {})
    for field in ("network.linear", "network.rank"):
        foreign.convert(field, f"{key}.rank")
    rank = foreign.value("network.rank", foreign.value("network.linear", 4))
    if not foreign.is_set(f"{key}.rank"):
        foreign.add_default(f"{key}.rank", rank, "rank 4")
    _read_alpha(foreign, rank)
    foreign.convert("network.dropout", f"{key}.dropout")
    is_whole = foreign.value("network.all_layers") is True
    if is_whole:
        foreign.convert("network.all_layers", f"{key}.target", ".*")
    else:
        foreign.ignore("network.all_layers", "switched off")
        target = _LAYERS.get(_kind(foreign) or "sd1", "all-linear")
        foreign.add_default(f"{key}.target", target, "the layers of this kind of model")


def _read_alpha(foreign: ForeignConfig, rank: object) -> None:
    """Read the adapter's alpha, which is the rank for all models but unets."""
    key, names = "model.adapter.alpha", ("network.linear_alpha", "network.alpha")
    if (_kind(foreign) or "sd1") not in _UNETS:
        foreign.add_default(key, as_float(rank), "alpha is the rank for this kind of model")
        for name in names:
            foreign.ignore(name, "for this kind of model alpha is the rank, there")
        return
    given = [name for name in names if foreign.value(name) is not None]
    if not given:
        foreign.add_default(key, 1.0, "alpha 1")
    for name in given[:1]:
        foreign.convert(name, key, as_float(foreign.value(name)))
    foreign.ignore("network.alpha", "linear_alpha is there, and wins")


def quantize(foreign: ForeignConfig) -> None:
    """Read what the frozen weights beneath an adapter are held in."""
    field, key = "model.quantize", "model.quantize"
    if foreign.value(field) is not True or not foreign.is_set("model.adapter.rank"):
        return
    kind = str(foreign.value("model.qtype", "qfloat8")).partition("|")[0]
    if any(few in kind for few in ("2", "3")):
        foreign.refuse("model.qtype", "has fewer bits than four", f"--set {key}=4bit", key)
    bits = "4bit" if "4" in kind else "8bit"
    foreign.convert(field, key, bits, "rounded in another way")
    foreign.note("model.qtype", f"{key} {bits}")


def times(foreign: ForeignConfig) -> None:
    """Read the times that a flow model is trained on."""
    key, name = "model.time_steps", "train.timestep_type"
    if foreign.value("train.noise_scheduler", "ddpm") != "flowmatch":
        for field in (name, "train.linear_timesteps"):
            foreign.ignore(field, "of models that learn a flow")
        return
    word = str(foreign.value(name, "sigmoid"))
    word = "linear" if foreign.value("train.linear_timesteps") is True else word
    foreign.ignore("train.linear_timesteps", "read with timestep_type")
    choices = {"sigmoid": "logit_normal", "linear": "uniform", "shift": "uniform"}
    if word not in choices:
        remedy = "sigmoid, linear or shift"
        why = "draws or weighs times in a way that is not here"
        foreign.refuse(name, why, remedy, f"{key}.distribution")
        return
    shift = None if word == "shift" else 1.0
    if foreign.value(name) is None:
        foreign.add_default(f"{key}.distribution", choices[word], f"times of {word}")
    foreign.convert(name, f"{key}.distribution", choices[word])
    why = "the scheduler's own" if shift is None else "times are not shifted"
    foreign.add_default(f"{key}.shift", shift, why)


def optimizer(foreign: ForeignConfig) -> None:
    """Read the optimizer and its parameters."""
    name, key = "train.optimizer", "optimizer.name"
    word = str(foreign.value(name, "adamw")).lower()
    choices = {"adamw": "adamw", "adamw8bit": "adamw8bit"}
    if word in choices:
        foreign.convert(name, key, choices[word])
    else:
        why = "is not computed here, or not as it is there, so the curve would be another"
        remedy = f"--set {key}=adamw8bit, with a learning rate for it"
        foreign.refuse(name, why, remedy, key)
    given = foreign.value("train.optimizer_params", {})
    fields = dict(given) if isinstance(given, dict) else {}
    betas = fields.pop("betas", [0.9, 0.999])
    decay, eps = fields.pop("weight_decay", 0.01), fields.pop("eps", 1e-6)
    if fields and word in choices:
        why = f"has {', '.join(fields)}, which the optimizer here does not have"
        foreign.refuse("train.optimizer_params", why, "take it out of the file", "optimizer")
    why = "AdamW's numbers, with those of optimizer_params"
    for field, value in (("weight_decay", decay), ("betas", betas), ("eps", eps)):
        foreign.add_default(f"optimizer.{field}", value, why)
    foreign.note("train.optimizer_params", "optimizer.weight_decay, betas and eps")


def schedule(foreign: ForeignConfig) -> None:
    """Read the learning rate's schedule."""
    name, key = "train.lr_scheduler", "schedule.decay"
    word = str(foreign.value(name, "constant"))
    given = foreign.value("train.lr_scheduler_params", {})
    fields = dict(given) if isinstance(given, dict) else {}
    warmup = fields.pop("num_warmup_steps", 1000 if word == "constant_with_warmup" else 0)
    choices = {"constant": "constant", "constant_with_warmup": "constant", "cosine": "cosine"}
    if word not in choices or (fields and set(fields) != {"factor"}):
        remedy = f"--set {key}=cosine, linear or constant"
        foreign.refuse(name, "is a schedule that is not here", remedy, key)
        foreign.refuse("train.lr_scheduler_params", "are of that schedule", remedy, key)
        return
    foreign.convert(name, key, choices[word])
    if not foreign.is_set(key):
        foreign.add_default(key, "constant", "no decay")
    foreign.add_default("schedule.final", 0.0, "a decay ends at nothing")
    if warmup:
        foreign.add_default("schedule.warmup", warmup, "warm-up of its schedule")
    foreign.note("train.lr_scheduler_params", "schedule.warmup")
