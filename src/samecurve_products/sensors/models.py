"""Classifiers of windows: [rows, channels, time] -> [rows, classes].

No operation has a fixed number format, so a float64 model computes in float64 throughout.
"""

import math
from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samecurve.seam import UserError
from samecurve_products.sensors.sections import TimeSeriesModel

_GROUPS = 8  # of channels that are normalised together, where their number allows it


def build_model(fields: TimeSeriesModel, *, channels: int, length: int, classes: int) -> nn.Module:
    """The model that the config names. length: time steps of a window.

    UserError: a window is no whole number of patches.
    """
    if fields.name == "resnet":
        return ResNet(fields, channels, classes)
    if fields.name == "mlp":
        return Perceptron(fields, channels * length, classes)
    if length % fields.patch:
        raise UserError(
            f"windows have {length} time steps, which is no multiple of model.patch {fields.patch}",
            "a patch that divides it",
            "model.patch",
        )
    return Transformer(fields, channels, length, classes)


class ResNet(nn.Module):
    """Residual convolutions over time, the mean over the remaining time steps, a linear layer."""

    def __init__(self, fields: TimeSeriesModel, channels: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            _convolution(channels, fields.width, fields.kernel_size),
            _norm(fields.norm, fields.width),
            nn.GELU(),
        )
        widths = [fields.width << stage for stage in range(fields.depth)]
        befores = [fields.width, *widths[:-1]]
        self.blocks = nn.ModuleList(
            ResidualBlock(before, width, fields)
            for before, width in zip(befores, widths, strict=True)
        )
        self.dropout = nn.Dropout(fields.dropout)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x.to(self.head.weight.dtype))
        for block in self.blocks:
            x = block(x)
        return cast("Tensor", self.head(self.dropout(x.mean(-1))))


class ResidualBlock(nn.Module):
    """Two convolutions and a shortcut around them.

    A block that widens halves the time steps, and its shortcut is a convolution of one step.
    GELU, not ReLU: the last bit of a float32 number can switch a ReLU on or off. The loss curves
    of two layouts then diverge (3e-8 to 1e-1 within 30 steps; with GELU they stay at rounding).
    """

    def __init__(self, before: int, width: int, fields: TimeSeriesModel) -> None:
        super().__init__()
        stride = 1 if before == width else 2
        self.first = _convolution(before, width, fields.kernel_size, stride)
        self.first_norm = _norm(fields.norm, width)
        self.second = _convolution(width, width, fields.kernel_size)
        self.second_norm = _norm(fields.norm, width)
        self.shortcut = nn.Conv1d(before, width, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.first_norm(self.first(x)))
        y = self.second_norm(self.second(y))
        return F.gelu(self.shortcut(x) + y)


def _convolution(before: int, after: int, size: int, stride: int = 1) -> nn.Conv1d:
    """A convolution without bias, since the norm that follows would remove a bias."""
    return nn.Conv1d(before, after, size, stride, padding=size // 2, bias=False)


def _norm(kind: str, width: int) -> nn.Module:
    if kind == "batch":
        return nn.BatchNorm1d(width)
    return nn.GroupNorm(math.gcd(_GROUPS, width), width)


class Transformer(nn.Module):
    """Each patch of time steps is a token; attention looks both ways."""

    def __init__(self, fields: TimeSeriesModel, channels: int, length: int, classes: int) -> None:
        super().__init__()
        self.patch = fields.patch
        self.embed = nn.Linear(channels * fields.patch, fields.width)
        self.position = nn.Embedding(length // fields.patch, fields.width)
        self.blocks = nn.ModuleList(AttentionBlock(fields) for _ in range(fields.depth))
        self.norm = nn.LayerNorm(fields.width)
        self.dropout = nn.Dropout(fields.dropout)
        self.head = nn.Linear(fields.width, classes)

    def forward(self, x: Tensor) -> Tensor:
        rows, channels, _ = x.shape
        patches = x.to(self.head.weight.dtype).view(rows, channels, -1, self.patch)
        tokens = self.embed(patches.transpose(1, 2).flatten(2))
        places = torch.arange(tokens.shape[1], device=x.device)
        tokens = tokens + self.position(places)
        for block in self.blocks:
            tokens = block(tokens)
        return cast("Tensor", self.head(self.dropout(self.norm(tokens).mean(1))))


class AttentionBlock(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self, fields: TimeSeriesModel) -> None:
        super().__init__()
        width, self.heads = fields.width, fields.heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feed_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        parts = self.query_key_value(self.attention_norm(x)).chunk(3, -1)
        query, key, value = (
            part.reshape(rows, tokens, self.heads, -1).transpose(1, 2) for part in parts
        )
        attended = F.scaled_dot_product_attention(query, key, value)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, tokens, width))
        return cast("Tensor", x + self.down(F.gelu(self.up(self.feed_norm(x)))))


class Perceptron(nn.Module):
    """Hidden layers over the whole window."""

    def __init__(self, fields: TimeSeriesModel, inputs: int, classes: int) -> None:
        super().__init__()
        sizes = [inputs, *[fields.width] * fields.depth]
        self.layers = nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(sizes))
        self.dropout = nn.Dropout(fields.dropout)
        self.head = nn.Linear(fields.width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.head.weight.dtype).flatten(1)
        for layer in self.layers:
            x = F.gelu(layer(x))
        return cast("Tensor", self.head(self.dropout(x)))
