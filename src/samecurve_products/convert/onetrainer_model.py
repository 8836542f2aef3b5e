"""What OneTrainer trains: kinds of models, the layers of an adapter, and text encoders."""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from samecurve_products.convert.foreign_config import ForeignConfig

_ATTENTION = {"attn-only": "attn"}
_BLOCKS = {**_ATTENTION, "blocks": "transformer_block"}
_FLUX_LAYERS = {**_BLOCKS, "attn-mlp": "attn,ff.net,proj_mlp"}
_UNET_LAYERS = {**_ATTENTION, "attn-mlp": "attentions"}


class ModelType(NamedTuple):
    """A kind of model.

    denoiser: the part that is trained
    encoders: how many text encoders it has
    flow: whether it learns a flow, whose times OneTrainer shifts by timestep_shift
    layers: what its window's choices of layers stand for, parts of their names
    """

    denoiser: str = "transformer"
    encoders: int = 1
    flow: bool = True
    layers: Mapping[str, str] = _BLOCKS


_SD = ModelType("unet", 1, flow=False, layers=_UNET_LAYERS)
_SD3 = ModelType(encoders=3)
TYPES: Mapping[str, ModelType] = {  # what task diffusion trains
    "STABLE_DIFFUSION_15": _SD,
    "STABLE_DIFFUSION_20": _SD,
    "STABLE_DIFFUSION_20_BASE": _SD,
    "STABLE_DIFFUSION_21": _SD,
    "STABLE_DIFFUSION_21_BASE": _SD,
    "STABLE_DIFFUSION_XL_10_BASE": _SD._replace(encoders=2),
    "STABLE_DIFFUSION_3": _SD3,
    "STABLE_DIFFUSION_35": _SD3,
    "FLUX_DEV_1": ModelType(encoders=2, layers=_FLUX_LAYERS),
    # klein; that dev is none, its directory says
    "FLUX_2": ModelType(layers={"blocks": "transformer_block"}),
    "Z_IMAGE": ModelType(
        layers={
            "blocks": "layers",
            "attn-mlp": "^(?=.*attention)(?!.*refiner).*,^(?=.*feed_forward)(?!.*refiner).*",
            "attn-only": "^(?=.*attention)(?!.*refiner).*",
        }
    ),
}
_OTHER_FLOW = (
    *("FLUX_FILL_DEV_1", "SANA", "HUNYUAN_VIDEO", "HI_DREAM_FULL", "CHROMA_1", "QWEN"),
    *("ANIMA", "KREA_2", "ERNIE", "IDEOGRAM_4"),
)
_PARTS = ("text_encoder", "text_encoder_2", "text_encoder_3", "text_encoder_4")
_PRECISIONS = {"FLOAT_32": "f32", "FLOAT_16": "f16", "BFLOAT_16": "bf16"}
_FROZEN = "text encoders stay as they are here: captions are encoded once, before the first step"


def served(model_type: object) -> bool:
    """Whether task diffusion trains such a model."""
    return str(model_type) in TYPES


def flows(model_type: object) -> bool:
    """Whether the model learns a flow."""
    name = str(model_type)
    return name in _OTHER_FLOW or (name in TYPES and TYPES[name].flow)


def of_unet(model_type: object) -> bool:
    """Whether the part that is trained is named unet."""
    name = str(model_type)
    return name.startswith("STABLE_DIFFUSION") and not name.startswith("STABLE_DIFFUSION_3")


def of_transformer(model_type: object) -> bool:
    """Whether the part that is trained is named transformer."""
    return not of_unet(model_type) and str(model_type) not in {"WUERSTCHEN_2", "STABLE_CASCADE_1"}


def text_encoders(foreign: ForeignConfig) -> None:
    """Read the sections of text encoders: none may be trained, all may drop captions alike."""
    kind = TYPES.get(str(foreign.value("model_type")), ModelType(encoders=0))
    own, others = _PARTS[: kind.encoders], _PARTS[kind.encoders :]
    for part in others:
        for name in foreign.open_fields(f"{part}."):
            foreign.ignore(name, "of parts that this model does not have")
    for part in own:
        _refuse_trained(foreign, part)
        if foreign.value(f"{part}.include") is False:
            foreign.refuse(f"{part}.include", "trains without this text encoder", "true", "model")
    if own:
        _read_dropout(foreign, own)
        _read_precision(foreign, own)


def _read_dropout(foreign: ForeignConfig, parts: Sequence[str]) -> None:
    """Read how often captions are dropped: there by each text encoder, here by all at once."""
    key = "data.captions.dropout"
    names = [f"{part}.dropout_probability" for part in parts]
    shares = [foreign.value(name, 0.0) for name in names]
    if any(share != shares[0] for share in shares):
        why = "is not the same for all text encoders; here a caption is dropped for all at once"
        foreign.refuse_all(names, why, f"--set {key}=0.1", key)
    for name in names:
        if shares[0] == 0.0:
            foreign.ignore(name, "switched off")
        foreign.convert(name, key, why="for all text encoders at once" if len(parts) > 1 else "")


def _read_precision(foreign: ForeignConfig, parts: Sequence[str]) -> None:
    """Read what text encoders compute in: one precision for all, the finest of any of them."""
    names = [f"{part}.weight_dtype" for part in parts]
    words = [str(foreign.value(name, "FLOAT_32")) for name in names]
    found = {_PRECISIONS.get(word, "bf16") for word in words}
    precision = next(word for word in ("f32", "bf16", "f16") if word in found)
    for name, word in zip(names, words, strict=True):
        why = (
            "" if _PRECISIONS.get(word) == precision else "for all of them; they are not quantized"
        )
        foreign.convert(name, "model.encoder_precision", precision, why)


def _refuse_trained(foreign: ForeignConfig, part: str) -> None:
    """Refuse a text encoder that OneTrainer trains, which it does where the file is silent."""
    if foreign.value(f"{part}.train", True) is False:
        foreign.ignore(f"{part}.train", "as here")
        return
    remedy = f'"{part}": {{"train": false}} in the file trains the {_denoiser(foreign)} alone'
    if foreign.value(f"{part}.train") is None:
        foreign.refuse_default(f"{part}.train", True, _FROZEN, remedy, "model")
    else:
        foreign.refuse(f"{part}.train", f"can't be: {_FROZEN}", remedy, "model")


def _denoiser(foreign: ForeignConfig) -> str:
    return TYPES.get(str(foreign.value("model_type")), ModelType()).denoiser


def layers(foreign: ForeignConfig) -> None:
    """Read which layers are trained: the target of an adapter, or what else is frozen."""
    field = "layer_filter" if foreign.value("layer_filter") else "lora_layers"
    patterns, is_regex, why = _patterns(foreign, field)
    names = ("layer_filter", "lora_layers")
    if foreign.value("training_method") == "LORA":
        target = _target(patterns, is_regex=is_regex)
        for name in names:
            foreign.convert(name, "model.adapter.target", target, why)
        if not foreign.is_set("model.adapter.target"):
            foreign.add_default("model.adapter.target", target, why or "all of its layers")
    elif not patterns:
        for name in names:
            foreign.ignore(name, "all layers are trained")
    elif is_regex:
        remedy = "optimizer.groups, whose patterns are those of a shell (docs/optimizers.md)"
        for name in names:
            foreign.refuse(name, "is a regular expression", remedy, "optimizer.groups")
    else:
        groups = [{"match": f"*{pattern}*", "lr_scale": 1.0} for pattern in patterns]
        groups.append({"match": "*", "freeze": True})
        for name in names:
            foreign.convert(name, "optimizer.groups", groups, "all else is frozen")


def _patterns(foreign: ForeignConfig, field: str) -> tuple[Sequence[str], bool, str]:
    """Parts of the names of layers, whether they are regular expressions, and a remark."""
    text = foreign.value(field)
    regex = foreign.value("layer_filter_regex") or foreign.value("lora_layers_regex")
    why = ""
    if not text:
        preset = foreign.value("layer_filter_preset", foreign.value("lora_layer_preset"))
        known = TYPES.get(str(foreign.value("model_type")), ModelType()).layers
        text = known.get(str(preset), "")
        regex = text.startswith("^")
        why = f"the layers that its window calls {preset}" if text else ""
    patterns = [part.strip() for part in str(text).split(",") if part.strip()]
    return patterns, bool(regex), why


def _target(patterns: Sequence[str], *, is_regex: bool) -> str:
    """A regular expression of whole names of layers; linear layers and convolutions have one."""
    if not patterns:
        return ".*"
    parts = patterns if is_regex else [re.escape(pattern) for pattern in patterns]
    return f".*({'|'.join(parts)}).*"
