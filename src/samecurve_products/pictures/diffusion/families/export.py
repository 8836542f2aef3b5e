"""A pipeline's directory as diffusers reads it, all but the denoiser's weights."""

import json
import shutil
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from samecurve_products.pictures.diffusion.families.directory import INDEX
from samecurve_products.pictures.diffusion.families.loading import (
    load_model,
    load_scheduler,
    load_tokenizer,
)
from samecurve_products.pictures.diffusion.families.model_files import (
    PICKLED,
    VARIANTS,
    read_config,
    weight_files,
)
from samecurve_products.pictures.diffusion.families.opened import Component, OpenedPipeline

DENOISER_FILE = "diffusion_pytorch_model.safetensors"
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".msgpack", ".onnx", *PICKLED)


def write_surroundings(opened: OpenedPipeline, directory: Path) -> None:
    """Write all of a pipeline's directory but the denoiser's weights.

    Parts of a single file are written as diffusers has them.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name, component in opened.components.items():
        home = directory / name
        home.mkdir(exist_ok=True)
        if name == opened.kind.component:
            config = {**component.config, "_class_name": component.class_name}
            _write_json(home / "config.json", config)
        elif name == "scheduler":  # the single file may have changed its config
            load_scheduler(opened).save_pretrained(home)
        elif name in opened.kind.encoders.values() and component.config:
            load_tokenizer(opened, name).save_pretrained(home)  # with an option of its own
        elif component.directory is not None and not component.in_file:
            _copy_component(component, home)
        else:
            model: Any = load_model(opened, name, torch.float32)
            model.save_pretrained(home)
    _write_json(directory / INDEX, _index(opened, directory))


def _index(opened: OpenedPipeline, directory: Path) -> dict[str, Any]:
    """model_index.json. Components that are not read here are copied where they are whole."""
    index: dict[str, Any] = {
        "_class_name": opened.kind.pipeline,
        "_diffusers_version": version("diffusers"),
    }
    if opened.layout == "directory":
        for name, value in read_config(opened.place / INDEX).items():
            if not isinstance(value, list) or name in opened.components:
                continue
            home = opened.place / name
            if home.is_dir() and value[0] is not None:
                shutil.copytree(home, directory / name, dirs_exist_ok=True)
                index[name] = value
            else:
                index[name] = [None, None]
    named = {n: [part.library, part.class_name] for n, part in opened.components.items()}
    return {**index, **named, **opened.settings}


def _copy_component(component: Component, to: Path) -> None:
    """Copy a component's files: of its weights those that were read, under their plain names."""
    assert component.directory is not None
    for file in component.directory.iterdir():
        if file.is_file() and not file.name.endswith(_WEIGHTS) and ".index." not in file.name:
            shutil.copyfile(file, to / file.name)
    if component.weights is None:
        return
    files = weight_files(component.weights)
    for file in {component.weights, *files}:
        is_named_in_index = file in files and file != component.weights
        name = file.name if is_named_in_index else _plain(file.name)
        shutil.copyfile(file, to / name)


def _plain(name: str) -> str:
    """A file's name without the variant that it is of."""
    for variant in filter(None, VARIANTS):
        name = name.replace(f".{variant}.", ".")
    return name


def _write_json(file: Path, values: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n")
