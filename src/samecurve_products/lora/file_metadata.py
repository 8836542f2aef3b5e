"""The metadata of an adapter's file, which front ends show beside its name.

Keys of kohya's trainer (ss_*) and of the Stability AI Model Metadata Standard (modelspec.*). Values
that are not known are left out, and nothing is taken from the clock or the machine.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from samecurve_products.lora.layouts import Layout
from samecurve_products.lora.sections import AdapterSection

_STABILITY = "https://github.com/Stability-AI/generative-models"


@dataclass(frozen=True, kw_only=True)
class AboutFile:
    """What a run knows of itself. None, '' and {}: not known."""

    title: str = ""
    date: str = ""  # of the run: ISO 8601
    resolution: tuple[int, int] | None = None  # width, height
    trigger: str = ""  # words that call up what was learnt
    captions: Mapping[str, int] = field(default_factory=dict)  # part of a caption -> pictures
    base: str = ""  # name of the model beneath
    prediction: str = ""  # epsilon, v
    steps: int | None = None
    epochs: int | None = None


class _Base(NamedTuple):
    """What front ends call a model that adapters are for."""

    version: str = ""  # ss_base_model_version
    architecture: str = ""  # modelspec.architecture
    implementation: str = "diffusers"


def file_metadata(
    model: Any, adapter: AdapterSection, layout: Layout, about: AboutFile
) -> dict[str, str]:
    """The metadata of an adapter's file. model: the plain model beneath"""
    values = {"format": "pt", **_network(adapter, layout), **_run(about)}
    values |= _model_spec(_base_of(model, about.prediction), about)
    return {key: str(value) for key, value in values.items() if value not in (None, "")}


def _network(adapter: AdapterSection, layout: Layout) -> dict[str, Any]:
    """The adapter as kohya's trainer describes it."""
    is_plain = adapter.kind == "lora"
    algorithm = {"algo": "lokr" if adapter.kind == "lokr" else "lora"}
    if adapter.kind == "dora":
        algorithm["dora_wd"] = "True"
    # in the layout of diffusers the factor is in the arrays
    alpha = adapter.alpha if layout == "kohya" else adapter.rank
    return {
        "ss_network_module": "networks.lora" if is_plain else "lycoris.kohya",
        "ss_network_args": "" if is_plain else json.dumps(algorithm),
        "ss_network_dim": adapter.rank,
        "ss_network_alpha": f"{alpha:g}",
    }


def _run(about: AboutFile) -> dict[str, Any]:
    sides = about.resolution
    frequencies = {about.title or "captions": dict(about.captions)} if about.captions else {}
    return {
        "ss_output_name": about.title,
        "ss_sd_model_name": about.base,
        "ss_resolution": f"({sides[0]}, {sides[1]})" if sides else "",
        "ss_steps": about.steps,
        "ss_epoch": about.epochs,
        "ss_tag_frequency": json.dumps(frequencies) if frequencies else "",
    }


def _model_spec(base: _Base, about: AboutFile) -> dict[str, Any]:
    sides = about.resolution
    known = {
        "ss_base_model_version": base.version,
        "modelspec.title": about.title,
        "modelspec.date": about.date,
        "modelspec.resolution": f"{sides[0]}x{sides[1]}" if sides else "",
        "modelspec.trigger_phrase": about.trigger,
        "modelspec.prediction_type": about.prediction,
    }
    if not base.architecture:
        return known
    return {
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": f"{base.architecture}/lora",
        "modelspec.implementation": base.implementation,
        **known,
    }


def _base_of(model: Any, prediction: str) -> _Base:
    """What front ends call a model, by its class and config. A model like none has no name."""
    config = getattr(model, "config", None)
    fields: Mapping[str, Any] = config if isinstance(config, Mapping) else {}
    kind = type(model).__name__
    if kind == "UNet2DConditionModel":
        return _unet(fields, prediction)
    if kind == "FluxTransformer2DModel" and fields.get("in_channels") == 64:
        name = "flux-1-dev" if fields.get("guidance_embeds") else "flux-1-schnell"
        return _Base("flux1", name, "https://github.com/black-forest-labs/flux")
    if kind == "SD3Transformer2DModel":
        size = {24: "medium", 38: "5-large"}.get(fields.get("num_layers", 0), "")
        if fields.get("dual_attention_layers"):
            size = "5-medium"
        return _Base("", f"stable-diffusion-3-{size}" if size else "")
    if kind == "ZImageTransformer2DModel":
        return _Base("zimage")
    return _Base()


def _unet(fields: Mapping[str, Any], prediction: str) -> _Base:
    width = fields.get("cross_attention_dim")
    if width == 2048 and fields.get("addition_embed_type") == "text_time":
        return _Base("sdxl_base_v1-0", "stable-diffusion-xl-v1-base", _STABILITY)
    if width == 768:
        return _Base("sd_v1", "stable-diffusion-v1")
    if width == 1024:
        size = {"v": "768-v", "epsilon": "512"}.get(prediction, "")
        return _Base("sd_v2", f"stable-diffusion-v2-{size}" if size else "")
    return _Base()
