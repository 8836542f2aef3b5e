"""A pipeline's directory, as diffusers writes it: what it has, and why another one is refused."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from samecurve.seam import UserError
from samecurve_products.pictures.diffusion.families.kinds import SERVED, Kind, kind_of
from samecurve_products.pictures.diffusion.families.model_files import (
    find_weights,
    has_pickles,
    read_config,
    read_header,
    weight_files,
)
from samecurve_products.pictures.diffusion.families.opened import WHERE, Component, OpenedPipeline

INDEX = "model_index.json"
WRITTEN = "a directory as diffusers' save_pretrained() writes it, with model_index.json"
_LIBRARIES = ("diffusers", "transformers")
# what else a directory may be: its file, what that makes it, what to do
_OTHERS = (
    (
        ("adapter_config.json", "pytorch_lora_weights.safetensors"),
        "it holds a LoRA, and no model",
        "the pipeline that the LoRA is for; its adapter is trained with model.adapter",
    ),
    (
        ("tokenizer.json", "generation_config.json"),
        "it holds a language model",
        "--task huggingface trains language models; for pictures, a pipeline's directory",
    ),
)


def open_directory(home: Path) -> OpenedPipeline:
    """A pipeline in a directory. UserError: it is none, not whole, or not served."""
    index = read_index(home, WHERE)
    kind = _served_kind(home, index, WHERE)
    parts = _components(home, kind, index, WHERE)
    return OpenedPipeline(kind=kind, place=home, components=parts, settings=settings_of(index))


def open_base(home: Path) -> tuple[Kind, dict[str, Component], dict[str, Any]]:
    """What model.base has for a single file: configs, tokenizers, and weights where there are any.

    Returns the kind, the components, and the settings.
    """
    index = read_index(home, "model.base")
    kind = _served_kind(home, index, "model.base")
    return kind, _components(home, kind, index, "model.base"), settings_of(index)


def read_index(home: Path, where: str) -> dict[str, Any]:
    """model_index.json of a directory. UserError: there is none; the error says what is there."""
    if (home / INDEX).is_file():
        return read_config(home / INDEX, where)
    for names, what, remedy in _OTHERS:
        if any((home / name).is_file() for name in names):
            raise UserError(f"{home} has no {INDEX}: {what}", remedy, where)
    if (home / "config.json").is_file():
        config = read_config(home / "config.json", where)
        if "_class_name" in config:
            raise UserError(
                f"{home} has no {INDEX}: it is a {config['_class_name']} alone, without the text"
                " encoders and the VAE of its pipeline",
                f"the pipeline's directory, which may be {home.parent}",
                where,
            )
        raise UserError(
            f"{home} has no {INDEX}: it holds a model of type {config.get('model_type')}",
            "--task huggingface trains models of the transformers library; for pictures,"
            f" {WRITTEN}",
            where,
        )
    single = sorted(file.name for file in home.glob("*.safetensors"))
    remedy = f"model.path: {home / single[0]} reads a checkpoint in one file; or " if single else ""
    raise UserError(f"{home} has no {INDEX}", f"{remedy}{WRITTEN}", where)


def settings_of(index: Mapping[str, Any]) -> dict[str, Any]:
    """What model_index.json says beside the components."""
    return {
        name: value
        for name, value in index.items()
        if not name.startswith("_") and not isinstance(value, list)
    }


def _present(index: Mapping[str, Any]) -> set[str]:
    """The components that model_index.json names; one that is left out is [null, null]."""
    return {
        name
        for name, value in index.items()
        if isinstance(value, list) and len(value) == 2 and value[0] is not None
    }


def _served_kind(home: Path, index: Mapping[str, Any], where: str) -> Kind:
    name = index.get("_class_name")
    kind = kind_of(name) if isinstance(name, str) else None
    if kind is None:
        what = f"a {name}" if isinstance(name, str) else f"code of its own ({name}), never run here"
        raise UserError(f"{home} is {what}, which is not trained here", SERVED, where)
    return kind


def _components(
    home: Path, kind: Kind, index: Mapping[str, Any], where: str
) -> dict[str, Component]:
    """The components of a directory. UserError: one is missing, or not whole.

    where: model.path, or model.base, whose components may lack weights
    """
    components = {}
    for name in kind.components(_present(index)):
        library, class_name = _class_of(home, name, kind, index, where)
        component = _read_component(home, name, kind, where)
        components[name] = replace(component, library=library, class_name=class_name)
    return components


def _class_of(
    home: Path, name: str, kind: Kind, index: Mapping[str, Any], where: str
) -> tuple[str, str]:
    """Library and class of a component. UserError: it is none that can be used here."""
    if name not in _present(index):
        raise UserError(
            f"{home}/{INDEX} names no {name}, which a {kind.pipeline} has",
            f"the whole pipeline: {WRITTEN}",
            where,
        )
    library, class_name = (str(value) for value in index[name])
    if library not in _LIBRARIES:
        raise UserError(
            f"{home}/{INDEX}: {name} is {class_name} of {library}; code that lies beside a model is"
            " not run",
            f"components of {' and '.join(_LIBRARIES)} alone",
            where,
        )
    expected = {kind.component: kind.denoiser, "vae": kind.vae}.get(name, class_name)
    if class_name != expected:
        raise UserError(
            f"{home}/{INDEX}: {name} is a {class_name}; that of a {kind.pipeline} is a {expected}",
            SERVED,
            where,
        )
    return library, class_name


def _read_component(home: Path, name: str, kind: Kind, where: str) -> Component:
    """Config and weights of a component. UserError: a file is missing, or not whole."""
    directory = home / name
    if not directory.is_dir():
        raise UserError(
            f"{home} has no directory {name}, which its {INDEX} names",
            "get the missing files too; nothing is downloaded",
            where,
        )
    if name in kind.encoders.values():
        return Component(directory=directory)
    if name == "scheduler":
        config = read_config(directory / "scheduler_config.json", where)
        return Component(config=config, directory=directory)
    stem = "model" if name in kind.encoders else "diffusion_pytorch_model"
    weights = find_weights(directory, stem, where)
    if weights is None and where == WHERE:
        raise _missing_weights(home, name, stem)
    for file in weight_files(weights, where) if weights else ():
        read_header(file, where)
    config = read_config(directory / "config.json", where)
    return Component(config=config, directory=directory, weights=weights)


def _missing_weights(home: Path, name: str, stem: str) -> UserError:
    directory = home / name
    if has_pickles(directory):
        return UserError(
            f"{directory} has its weights as a pickle, which could run any code and is not read",
            f"convert it where you trust it: DiffusionPipeline.from_pretrained('{home}',"
            " use_safetensors=False).save_pretrained(DIR)",
            WHERE,
        )
    return UserError(
        f"{directory} has no weights: no {stem}.safetensors, and no index of several",
        "get the missing files too; nothing is downloaded",
        WHERE,
    )
