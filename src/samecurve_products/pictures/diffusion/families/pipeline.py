"""Opening a pipeline: a directory that diffusers writes, or a checkpoint in one file.

No weights are read, nothing is downloaded, and code that lies beside a model is never run.
"""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from samecurve.seam import UserError
from samecurve_products.pictures.diffusion.families.directory import WRITTEN, open_directory
from samecurve_products.pictures.diffusion.families.model_files import PICKLED
from samecurve_products.pictures.diffusion.families.opened import WHERE, OpenedPipeline
from samecurve_products.pictures.diffusion.families.single_file import open_single_file

if TYPE_CHECKING:
    from samecurve_products.pictures.diffusion.families.base import Family

_FLOW = "FlowMatchEulerDiscreteScheduler"


def open_pipeline(place: Path, base: Path | None = None) -> OpenedPipeline:
    """The pipeline at a path, its configs read.

    base: of a single file, the directory with what the file lacks

    UserError: there is nothing, it is damaged, or it is of a kind that can't be trained here.
    """
    if not place.exists():
        raise UserError(
            f"there is no {place}, and nothing is downloaded",
            f"{WRITTEN}, or a checkpoint in one .safetensors file, on this machine",
            WHERE,
        )
    if place.is_dir():
        if base is not None:
            raise UserError(
                f"model.base {base}: {place} is a whole pipeline, and needs no base",
                "leave model.base out",
                "model.base",
            )
        opened = open_directory(place)
    elif place.suffix == ".safetensors":
        opened = open_single_file(place, base)
    else:
        raise _not_read(place)
    _check_denoiser(opened)
    _check_scheduler(opened)
    return opened


def _not_read(place: Path) -> UserError:
    if place.suffix in PICKLED:
        return UserError(
            f"{place} is a pickle, which could run any code, and is not read",
            "a checkpoint in one .safetensors file; where you trust this one, convert it:"
            " safetensors.torch.save_file(torch.load(FILE)['state_dict'], 'model.safetensors')",
            WHERE,
        )
    return UserError(
        f"{place} is no pipeline, by its name",
        f"{WRITTEN}, or a checkpoint in one .safetensors file",
        WHERE,
    )


def _check_denoiser(opened: OpenedPipeline) -> None:
    """UserError: the denoiser takes more than noisy latents and what stands for a caption."""
    config = opened.denoiser.config
    taken = config.get("in_channels", 0)
    given = opened.latent_channels
    if opened.kind.pipeline == "FluxPipeline":
        given *= opened.patch**2  # patches are laid into channels before the denoiser
    if taken != given:
        raise UserError(
            f"{opened.place}: its {opened.kind.component} takes {taken} channels, and the VAE gives"
            f" {given}: it was made for inpainting, depth or editing",
            f"a pipeline that makes pictures from text alone: {opened.kind.pipeline}",
            WHERE,
        )
    if config.get("time_cond_proj_dim") is not None:
        raise UserError(
            f"{opened.place}: its {opened.kind.component} is distilled for few steps and takes the"
            " guidance as an input, for which there is no training target here",
            "the pipeline that it was distilled from",
            WHERE,
        )


def _check_scheduler(opened: OpenedPipeline) -> None:
    """UserError: the scheduler is of another kind of model."""
    name, kind = opened.components["scheduler"].class_name, opened.kind
    is_flow = name.startswith("FlowMatch")
    if (kind.is_flow and name != _FLOW) or (is_flow and not kind.is_flow):
        fitting = _FLOW if kind.is_flow else "a scheduler of noise, such as DDIMScheduler"
        raise UserError(
            f"{opened.place}: its scheduler is a {name}, with which a {kind.pipeline} makes no"
            " pictures",
            f"{fitting}, in model_index.json and scheduler/scheduler_config.json",
            WHERE,
        )


def family_of(opened: OpenedPipeline) -> "Family":
    """What is done with a pipeline of its kind. Imports torch."""
    module, name = opened.kind.family
    package = __name__.rpartition(".")[0]
    family_class = getattr(importlib.import_module(f"{package}.{module}"), name)
    family: Family = family_class(opened)
    return family
