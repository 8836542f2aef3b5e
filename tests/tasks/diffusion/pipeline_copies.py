"""Copies of a pipeline's directory, and what may be wrong with them."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from samecurve_products.pictures.diffusion.families.library import library
from samecurve_products.pictures.diffusion.families.opened import OpenedPipeline
from samecurve_products.pictures.diffusion.families.pipeline import open_pipeline

INDEX, UNET, SCHEDULER = "model_index.json", "unet/config.json", "scheduler/scheduler_config.json"


class Copy:
    """A copy of a pipeline's directory, and what may be wrong with it."""

    def __init__(self, home: Path) -> None:
        self.home = home  # what is opened

    def weights(self, component: str) -> Path:
        return self.home / component / "diffusion_pytorch_model.safetensors"

    def write(self, name: str, text: str) -> None:
        (self.home / name).write_text(text)

    def only(self, name: str, text: str) -> None:
        """Nothing but one file."""
        self.remove()
        self.home.mkdir()
        self.write(name, text)

    def remove(self, component: str = "") -> None:
        shutil.rmtree(self.home / component)

    def without_weights(self, component: str, instead: str = "config.json") -> None:
        self.weights(component).unlink()
        (self.home / component / instead).touch()

    def change(self, name: str, **values: Any) -> None:
        file = self.home / name
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    def cut(self, component: str) -> None:
        content = self.weights(component).read_bytes()
        self.weights(component).write_bytes(content[: len(content) // 2])

    def lose_a_shard(self, component: str) -> None:
        self.weights(component).unlink()
        index = {"weight_map": {"conv_in.weight": "gone.safetensors"}}
        self.write(f"{component}/diffusion_pytorch_model.safetensors.index.json", json.dumps(index))

    def go_into(self, component: str) -> None:
        self.home /= component


def changed(home: Path, to: Path, name: str, **values: Any) -> OpenedPipeline:
    """A copy of a pipeline, with other values in one of its configs."""
    copy = Copy(to)
    shutil.copytree(home, to)
    copy.change(name, **values)
    return open_pipeline(to)


def own_pipeline(opened: OpenedPipeline) -> Any:
    """The library's own pipeline, in float64."""
    diffusers = library("diffusers")
    options = {"add_watermarker": False} if "XL" in opened.kind.pipeline else {}
    pipeline = diffusers.DiffusionPipeline.from_pretrained(
        opened.place, local_files_only=True, **options
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(torch.float64)
