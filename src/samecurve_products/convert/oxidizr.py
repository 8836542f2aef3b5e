"""Functions that oxidizr.yaml names."""

from collections.abc import Callable, Mapping
from typing import Any

from samecurve_products.convert.foreign_config import ForeignConfig

_LANGUAGE = {  # fields of the model that task `language` has under the same names
    "hidden_size",
    "num_layers",
    "num_heads",
    "kv_heads",
    "intermediate_size",
    "vocab_size",
    "max_seq_len",
    "rope_theta",
}

# conditions on a field's value, and conversions of one, by their names in the table
FUNCTIONS: Mapping[str, Callable[[Any], Any]] = {
    "integer": lambda value: isinstance(value, int),  # an integer
    # a switch that is on where it is not in the file
    "on_or_absent": lambda value: value is None or bool(value),
    "zero": lambda value: value is None or (value == 0 and not isinstance(value, bool)),  # no steps
    "full": lambda value: isinstance(value, list) and bool(value),  # a list with something in it
    "joined": lambda ids: ",".join(map(str, ids)),  # devices as a flag takes them: [0, 1] -> '0,1'
    "one_if_on": lambda switch: int(bool(switch)),  # the number of shared experts
}


def model_kind(foreign: ForeignConfig) -> str:
    """The group of rules that reads the model: task `language`, or the nearest library model."""
    mamba, layers = _mamba_layers(foreign), foreign.value("model.num_layers")
    experts, latent = foreign.value("model.num_experts"), foreign.value("model.kv_latent_dim")
    if not (experts or latent or foreign.value("model.mamba_layers")):
        return "language"
    if mamba and len(mamba) == layers:
        return "mamba2"
    if mamba:
        return "granitemoehybrid" if experts else "bamba"
    if latent:
        return "deepseek_v3"
    return "granitemoeshared" if foreign.value("model.shared_expert_enabled") else "mixtral"


def read_language(foreign: ForeignConfig) -> None:
    """Pass the fields of the model on; our config refuses what the task lacks, and says why."""
    for field in foreign.open_fields("model."):
        if field.removeprefix("model.") not in _LANGUAGE and not foreign.value(field):
            foreign.ignore(field, "switched off")
        else:
            foreign.convert(field, field)


def use_library(foreign: ForeignConfig) -> None:
    """Set the task that trains library models."""
    foreign.document.set("task", "huggingface", "a config of Oxidizr")


def refuse_mamba_3(foreign: ForeignConfig) -> None:
    """Refuse what is switched on of Mamba-3."""
    for field in foreign.open_fields("model.mamba3_"):
        if foreign.value(field):
            why = "has no equal: the library has no Mamba-3"
            foreign.refuse(field, why, "leave it out for Mamba-2")


def skip_switched_off(foreign: ForeignConfig) -> None:
    """Leave the parts of a library model out that are switched off."""
    for field in foreign.open_fields("model."):
        if not foreign.value(field):
            foreign.ignore(field, "switched off")


def width(foreign: ForeignConfig) -> object:
    """The width of a feed-forward part: four times the hidden size where no field says it."""
    hidden = foreign.value("model.hidden_size")
    default = 4 * hidden if isinstance(hidden, int) else None
    return foreign.value("model.intermediate_size", default)


def four_hidden(foreign: ForeignConfig) -> object:
    """Four times the hidden size."""
    hidden = foreign.value("model.hidden_size")
    assert isinstance(hidden, int)
    return 4 * hidden


def rope(foreign: ForeignConfig) -> dict[str, object]:
    """The library's rotary parameters."""
    return {"rope_type": "default", "rope_theta": foreign.value("model.rope_theta")}


def rope_of_whole_heads(foreign: ForeignConfig) -> dict[str, object]:
    """The library's rotary parameters where a head is rotated as a whole."""
    return {**rope(foreign), "partial_rotary_factor": 1.0}


def add_head_sizes(foreign: ForeignConfig) -> None:
    """Set the sizes of a head beside its rotary part."""
    if size := _head_size(foreign):
        why = "a head's size beside its rotary part: hidden_size / num_heads"
        for name in ("qk_nope_head_dim", "v_head_dim"):
            foreign.add_default(f"model.{name}", size, why)


def add_score_scale(foreign: ForeignConfig) -> None:
    """Set what scores of attention are multiplied by."""
    if size := _head_size(foreign):
        why = "scores over the root of a head's size"
        foreign.add_default("model.attention_multiplier", size**-0.5, why)


def layer_types(foreign: ForeignConfig) -> list[str]:
    """The kind of each layer."""
    mamba, layers = _mamba_layers(foreign), foreign.value("model.num_layers")
    count = layers if isinstance(layers, int) else 0
    return ["mamba" if layer in mamba else "attention" for layer in range(count)]


def attention_layers(foreign: ForeignConfig) -> list[int]:
    """The layers with attention."""
    return [layer for layer, kind in enumerate(layer_types(foreign)) if kind == "attention"]


def dense_layers(foreign: ForeignConfig) -> object:
    """The number of layers without experts: none, or all."""
    return 0 if foreign.value("model.num_experts") else foreign.value("model.num_layers")


def _mamba_layers(foreign: ForeignConfig) -> list[object]:
    layers = foreign.value("model.mamba_layers")
    return layers if isinstance(layers, list) else []


def _head_size(foreign: ForeignConfig) -> int | None:
    hidden, count = foreign.value("model.hidden_size"), foreign.value("model.num_heads")
    if isinstance(hidden, int) and isinstance(count, int) and count > 0:
        return hidden // count
    return None
