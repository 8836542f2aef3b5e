"""A model of timm as the vision task's model: its head, its norms, and weights from files.

The model keeps timm's names, so its checkpoints are read by timm as they are.
"""

import hashlib
import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from samecurve_products.lora import StoredArray
from samecurve_products.pictures.vision.sections import VisionModel
from samecurve_products.pictures.vision.timm_library import check_name, config_of, create

_SPREAD = 0.02  # deviation of a new head's weights; its biases are 0
_POSITIONS = "pos_embed"
_TOLERANCE = 1e-6  # of a mean and a deviation


class Backbone:
    """timm's model for images of a shape.

    shape: height, width and channels of an image. classes: the outputs of the head

    UserError: timm has no such model.
    """

    def __init__(self, fields: VisionModel, shape: tuple[int, int, int], classes: int) -> None:
        assert fields.backbone is not None
        check_name(fields.backbone)
        self._fields, self._shape, self._classes = fields, shape, classes
        self._name = fields.backbone
        self._facts = config_of(self._name)

    def build(self) -> nn.Module:
        """A model with first values of its own. UserError: timm can't build it so."""
        height, width, channels = self._shape
        options: dict[str, Any] = {"num_classes": self._classes, "in_chans": channels}
        if self._facts.fixed_input_size:
            options["img_size"] = (height, width)
        if self._fields.dropout:
            options["drop_rate"] = self._fields.dropout
        if self._fields.drop_path:
            options["drop_path_rate"] = self._fields.drop_path
        model = create(self._name, **options)
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                _take_activation_out(module)
                if self._fields.freeze_norms:
                    module.eval()
        return model

    @cached_property
    def heads(self) -> tuple[str, ...]:
        """Names of the layers whose outputs are the classes."""
        named = self._facts.classifier
        return (named,) if isinstance(named, str) else tuple(named or ())

    def first_arrays(self, arrays: Mapping[str, StoredArray]) -> dict[str, StoredArray]:
        """A source's arrays with a head for these classes, and positions for this size of image.

        Values of a new head follow from the array's name, so every process makes the same.
        """
        with torch.device("meta"):
            model: Any = self.build()
        result = dict(arrays)
        like = next(iter(arrays.values()), None)
        for name, tensor in model.state_dict().items():
            shape = tuple(tensor.shape)
            is_head = any(name.startswith(f"{head}.") for head in self.heads)
            if like is not None and is_head and _shape_of(result, name) != shape:
                read = partial(_new_value, name, shape)
                result[name] = replace(like, dtype="float32", shape=shape, read=read)
            if name == _POSITIONS and name in result and _can_stretch(result[name].shape, shape):
                size, prefix = list(model.patch_embed.grid_size), model.num_prefix_tokens
                read = partial(_stretched, arrays[name].read, size, prefix)
                result[name] = replace(result[name], shape=shape, read=read)
        return result

    def notes(self, mean: Sequence[float], std: Sequence[float]) -> list[str]:
        """Lines for the user. mean, std: by which images are normalised"""
        if self._fields.path is None:
            return [f"model {self._name} of timm with random weights"]
        lines = [f"model {self._name} of timm with the weights of {self._fields.path}"]
        theirs = tuple(self._facts.mean), tuple(self._facts.std)
        if not _near(mean, theirs[0]) or not _near(std, theirs[1]):
            lines.append(
                f"model timm's own weights of {self._name} saw images with data.mean"
                f" {list(theirs[0])} and data.std {list(theirs[1])}; here they are {list(mean)} and"
                f" {list(std)}"
            )
        return lines


def unlike_backbone(fields: VisionModel, foreign: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """What a source's own words say of its model, though its shapes fit: (fatal, differing)."""
    theirs = foreign.get("backbone")
    file = foreign.get("config.json")
    if file is not None:
        try:
            theirs = json.loads(Path(file).read_text()).get("architecture")
        except (OSError, ValueError, AttributeError):
            return [], []
    if theirs is None or fields.backbone is None:
        return [], []
    own = fields.backbone.partition(".")[0]
    if str(theirs).partition(".")[0] != own:
        return [f"backbone {theirs}, here {own}"], []
    return [], []


def _take_activation_out(norm: Any) -> None:
    """Let timm's BatchNorm with an activation be a plain BatchNorm, and run the rest after it.

    Names and results stay. A plain BatchNorm is one that train.norm_sync can synchronise.
    """
    if type(norm).__name__ != "BatchNormAct2d":
        return
    norm.__class__ = nn.BatchNorm2d
    norm.register_forward_hook(_activate)


def _activate(norm: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    del inputs
    activated: torch.Tensor = norm.act(norm.drop(output))
    return activated


def _shape_of(arrays: Mapping[str, StoredArray], name: str) -> tuple[int, ...] | None:
    return tuple(arrays[name].shape) if name in arrays else None


def _new_value(name: str, shape: tuple[int, ...]) -> NDArray[Any]:
    if len(shape) < 2:
        return np.zeros(shape, np.float32)
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])
    return np.random.default_rng(key).normal(0.0, _SPREAD, shape).astype(np.float32)


def _can_stretch(theirs: tuple[int, ...], ours: tuple[int, ...]) -> bool:
    return len(theirs) == len(ours) == 3 and theirs != ours and theirs[2] == ours[2]


def _stretched(read: Any, size: list[int], prefix: int) -> NDArray[Any]:
    """Positions of another size of image, interpolated as timm does it.

    size: rows and columns. prefix: positions before them, of class tokens
    """
    layers: Any = importlib.import_module("timm.layers")
    positions = torch.from_numpy(np.ascontiguousarray(read())).float()
    stretched: torch.Tensor = layers.resample_abs_pos_embed(
        positions, new_size=size, num_prefix_tokens=prefix
    )
    return stretched.numpy()


def _near(first: Sequence[float], second: Sequence[float]) -> bool:
    return len(first) == len(second) and all(
        abs(a - b) < _TOLERANCE for a, b in zip(first, second, strict=True)
    )
