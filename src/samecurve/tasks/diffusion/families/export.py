"""A pipeline's directory as diffusers reads it, with the trained denoiser in place of its own."""

import json
import shutil
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from samecurve.tasks.diffusion.families.directory import INDEX
from samecurve.tasks.diffusion.families.loading import load_model, load_scheduler, load_tokenizer
from samecurve.tasks.diffusion.families.model_files import (
    PICKLED,
    VARIANTS,
    read_config,
    weight_files,
)
from samecurve.tasks.diffusion.families.opened import Component, OpenedPipeline

_STEM = "diffusion_pytorch_model"
DENOISER_FILE = f"{_STEM}.safetensors"
_LARGEST = 5 << 30  # bytes of a file of weights
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".msgpack", ".onnx", *PICKLED)


def export_denoiser(
    opened: OpenedPipeline,
    tensors: Mapping[str, Tensor],
    directory: Path,
    largest: int = _LARGEST,
) -> None:
    """Write a whole pipeline whose denoiser has these arrays, in their number formats.

    tensors: by the library's names
    largest: bytes of a file of weights
    """
    write_surroundings(opened, directory)
    home = directory / opened.kind.component
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        held = sum(other.nbytes for other in shards[-1].values())
        if shards[-1] and held + tensor.nbytes > largest:
            shards.append({})
        shards[-1][name] = tensor
    places = {}
    for number, shard in enumerate(shards, 1):
        file = f"{_STEM}.safetensors"
        if len(shards) > 1:
            file = f"{_STEM}-{number:05d}-of-{len(shards):05d}.safetensors"
        written = {name: tensor.detach().cpu().contiguous() for name, tensor in shard.items()}
        save_file(written, home / file, {"format": "pt"})
        places.update(dict.fromkeys(shard, file))
    if len(shards) > 1:
        size = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": size}, "weight_map": places}
        _write_json(home / f"{_STEM}.safetensors.index.json", index)


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
