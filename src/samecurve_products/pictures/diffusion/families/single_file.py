"""A checkpoint in one .safetensors file: what it holds, by the names of its arrays.

Such a file has no configs and no tokenizer. Those come from model.base: a pipeline's directory, or,
for the published sizes of Stable Diffusion 1 and SDXL, a directory with CLIP's tokenizer alone.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from samecurve.seam import UserError
from samecurve_products.pictures.diffusion.families.directory import INDEX, open_base
from samecurve_products.pictures.diffusion.families.kinds import KINDS, SERVED, Kind
from samecurve_products.pictures.diffusion.families.model_files import ArrayHeader, read_header
from samecurve_products.pictures.diffusion.families.opened import WHERE, Component, OpenedPipeline
from samecurve_products.pictures.diffusion.families.original_models import ORIGINAL_MODELS, SETTINGS

BASE = "model.base"
_DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "BOOL")
_TOKENIZER_FILES = ("tokenizer.json", "vocab.json")
_GET_TOKENIZER = (
    "hf download openai/clip-vit-large-patch14 vocab.json merges.txt --local-dir clip; then"
    " model.base: clip"
)
_WHOLE_BASE = (
    "model.base: the directory of the pipeline that the file is of, as diffusers writes it"
)
_LORA = re.compile(r"lora_|\.lora\.|lokr_|hada_|\.alpha$|\.dora_scale$")
# what a file may hold that is no model for pictures from text: pattern, what it is
_OTHERS = (
    (r"^control_model\.|^controlnet_|^input_hint_block\.", "a ControlNet"),
    (r"^(emb_params|clip_[lg])$|^<.*>$", "an embedding (textual inversion)"),
    (r"^conditioner\.embedders\.0\.model\.", "the SDXL refiner, which only finishes pictures"),
    (r"^(model\.)?embed_tokens\.|^model\.layers\.|^transformer\.h\.", "a language model"),
)
_VAE_ALONE = re.compile(r"^(first_stage_model\.|vae\.)?(en|de)coder\.")
# prefixes of the arrays of other components than the denoiser: in the file's own layout
_INSIDE: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "StableDiffusionPipeline": {
        "vae": ("first_stage_model.", "vae."),
        "text_encoder": ("cond_stage_model.transformer.", "cond_stage_model.model."),
    },
    "StableDiffusionXLPipeline": {
        "vae": ("first_stage_model.", "vae."),
        "text_encoder": ("conditioner.embedders.0.transformer.",),
        "text_encoder_2": ("conditioner.embedders.1.model.",),
    },
}


class Layout(NamedTuple):
    """How a file names the arrays of a denoiser."""

    pipelines: tuple[str, ...]  # that it may be of
    pattern: str  # one of its names
    original: bool = True  # as the model's authors wrote it; False: as diffusers does


_LAYOUTS = (
    Layout(("ZImagePipeline",), r"^(model\.diffusion_model\.)?layers\.0\.attention\.qkv\.weight$"),
    Layout(("ZImagePipeline",), r"^x_pad_token$", original=False),
    Layout(
        ("StableDiffusion3Pipeline",),
        r"^(model\.diffusion_model\.)?joint_blocks\.0\.x_block\.attn\.qkv\.weight$",
    ),
    Layout(
        ("Flux2KleinPipeline",),
        r"^(model\.diffusion_model\.)?single_stream_modulation\.lin\.weight$",
    ),
    Layout(
        ("FluxPipeline",),
        r"^(model\.diffusion_model\.)?double_blocks\.0\.img_attn\.norm\.key_norm\.scale$",
    ),
    Layout(
        ("StableDiffusion3Pipeline", "FluxPipeline", "Flux2KleinPipeline"),
        r"^transformer_blocks\.0\.attn\.add_q_proj\.weight$",
        original=False,
    ),
    Layout(("StableDiffusionXLPipeline",), r"^model\.diffusion_model\.label_emb\.0\.0\.weight$"),
    Layout(("StableDiffusionPipeline",), r"^model\.diffusion_model\.input_blocks\.0\.0\.weight$"),
    Layout(
        ("StableDiffusionPipeline", "StableDiffusionXLPipeline"),
        r"^down_blocks\.0\.resnets\.0\.conv1\.weight$",
        original=False,
    ),
)


def open_single_file(file: Path, base: Path | None) -> OpenedPipeline:
    """The pipeline of a checkpoint in one file.

    base: the directory with what the file lacks

    UserError: the file holds something else, or something is lacking.
    """
    arrays = read_header(file)
    layout = _layout_of(file, arrays)
    _check_dtypes(file, arrays)
    kind, components, settings = _around(file, layout, arrays, base)
    notes = []
    inside = _INSIDE.get(kind.pipeline, {}) if layout.original else {}
    for name, component in components.items():
        is_inside = name == kind.component or any(
            array.startswith(inside.get(name, ())) for array in arrays
        )
        if is_inside:
            components[name] = replace(component, weights=None, in_file=True)
        elif component.weights is not None:
            notes.append(f"{name}: that of {component.directory}, none of {file.name}")
        elif name == "vae" or name in kind.encoders:
            raise UserError(
                f"{file} holds no {name}, and {base} has no weights of one", _WHOLE_BASE, BASE
            )
    if "v_pred" in arrays:  # a marker that trainers of SDXL write into files
        components["scheduler"] = _predicting_v(components["scheduler"], arrays)
        notes.append(f"{file.name} says that it predicts v (its array v_pred)")
    return OpenedPipeline(
        kind=kind,
        place=file,
        components=components,
        settings=settings,
        layout="original" if layout.original else "diffusers",
        notes=tuple(notes),
    )


def _layout_of(file: Path, arrays: Mapping[str, ArrayHeader]) -> Layout:
    """The layout of a file. UserError: it is none that is served; the error says what it holds."""
    if any(_LORA.search(name) for name in arrays):
        raise UserError(
            f"{file} holds a LoRA, and no model",
            "the model that the LoRA is for; its adapter is trained with model.adapter",
            WHERE,
        )
    for pattern, what in _OTHERS:
        if any(re.search(pattern, name) for name in arrays):
            raise UserError(f"{file} holds {what}", f"a checkpoint of {_names()}", WHERE)
    for layout in _LAYOUTS:
        if any(re.search(layout.pattern, name) for name in arrays):
            return layout
    if arrays and all(_VAE_ALONE.search(name) or "quant_conv" in name for name in arrays):
        raise UserError(
            f"{file} holds a VAE alone", f"a checkpoint of {_names()}, with its denoiser", WHERE
        )
    first = ", ".join(sorted(arrays)[:3])
    raise UserError(
        f"{file} holds no denoiser that is known here: {len(arrays)} arrays ({first}, ...)",
        f"a checkpoint of {_names()}; or a directory of one of {SERVED}",
        WHERE,
    )


def _names() -> str:
    served = {name for layout in _LAYOUTS for name in layout.pipelines}
    return ", ".join(kind.name for kind in KINDS if kind.pipeline in served)


def _check_dtypes(file: Path, arrays: Mapping[str, ArrayHeader]) -> None:
    other = sorted({array.dtype for array in arrays.values()} - set(_DTYPES))
    if other:
        raise UserError(
            f"{file} holds {', '.join(other)} values: it is quantized for making pictures",
            "the checkpoint in bf16, f16 or f32 that it was made from",
            WHERE,
        )


def _around(
    file: Path, layout: Layout, arrays: Mapping[str, ArrayHeader], base: Path | None
) -> tuple[Kind, dict[str, Component], dict[str, Any]]:
    """Kind, components and settings around a file's weights. UserError: something is lacking."""
    if base is not None and not base.is_dir():
        raise UserError(f"there is no directory {base}", _WHOLE_BASE, BASE)
    if base is not None and (base / INDEX).is_file():
        kind, components, settings = open_base(base)
        if kind.pipeline not in layout.pipelines:
            raise UserError(
                f"{base} is a {kind.pipeline}, and {file} a checkpoint of"
                f" {' or '.join(layout.pipelines)}",
                _WHOLE_BASE,
                BASE,
            )
        return kind, components, settings
    table = ORIGINAL_MODELS.get(layout.pipelines[0]) if layout.original else None
    of_other_size = "cond_stage_model.model.positional_embedding" in arrays  # Stable Diffusion 2
    if table is None or of_other_size:
        what = "Stable Diffusion 2" if of_other_size else " or ".join(layout.pipelines)
        raise UserError(
            f"{file} is a checkpoint of {what} in one file, which has no configs and no tokenizer",
            _WHOLE_BASE,
            BASE,
        )
    (kind,) = (kind for kind in KINDS if kind.pipeline == layout.pipelines[0])
    components = {
        name: Component(library=library, class_name=class_name, config=config)
        for name, (library, class_name, config) in table.items()
    }
    for name in kind.encoders.values():
        components[name] = replace(components[name], directory=_tokenizer(file, name, base))
    return kind, components, dict(SETTINGS.get(kind.pipeline, {}))


def _tokenizer(file: Path, name: str, base: Path | None) -> Path:
    """The directory of a tokenizer. UserError: there is none."""
    if base is None:
        raise UserError(
            f"{file} has no tokenizer (no checkpoint in one file has), and nothing is downloaded",
            f"model.base: the directory of any pipeline of its kind; or {_GET_TOKENIZER}",
            BASE,
        )
    for directory in (base / name, base / "tokenizer", base):
        if any((directory / tokenizer).is_file() for tokenizer in _TOKENIZER_FILES):
            return directory
    raise UserError(
        f"{base} has neither {INDEX} nor a tokenizer ({' or '.join(_TOKENIZER_FILES)})",
        f"{_WHOLE_BASE}; or {_GET_TOKENIZER}",
        BASE,
    )


def _predicting_v(scheduler: Component, arrays: Mapping[str, ArrayHeader]) -> Component:
    config = {**scheduler.config, "prediction_type": "v_prediction"}
    if "ztsnr" in arrays:
        config["rescale_betas_zero_snr"] = True
    return replace(scheduler, config=config)
