"""The digest of the frozen weights of a model whose checkpoints leave them out.

The digest is the same for every strategy and precision. For each array, the bits of each value are
multiplied by the value's place and added up; such sums of shards add up to that of the array.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from samecurve.errors import UserError
from samecurve.torch_engine.optimizers import local_view

_CHUNK = 1 << 22  # values that are read at once
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, of 64 bits, as a signed number


def place_sum(part: torch.Tensor, shape: Sequence[int], offsets: Sequence[int]) -> torch.Tensor:
    """The sum of a part of an array, modulo 2^64. The sums of its parts add up to the array's sum.

    part: real values, rows of an array
    shape: the shape of the array
    offsets: where the part begins in the array; 0 in every dimension but the first
    """
    begin = offsets[0] * math.prod(shape[1:]) if offsets else 0
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    values = part.detach().reshape(-1)
    for first in range(0, len(values), _CHUNK):
        chunk = values[first : first + _CHUNK]
        bits = chunk.to(torch.float32).view(torch.int32).to(torch.int64)
        places = torch.arange(len(bits), dtype=torch.int64, device=bits.device)
        total += ((bits ^ (bits << 29)) * ((places + begin + first) * 2 + 1) * _FACTOR).sum()
    return total


def combined_digest(shapes: Mapping[str, Sequence[int]], sums: Sequence[int]) -> bytes:
    """SHA-256 over names, shapes and sums.

    sums: place_sum() of each array, in the order of `shapes`
    """
    lines = [
        f"{name} {list(shape)} {total}"
        for (name, shape), total in zip(shapes.items(), sums, strict=True)
    ]
    return hashlib.sha256("\n".join(sorted(lines)).encode()).digest()


@torch.no_grad()
def model_digest(model: nn.Module) -> bytes:
    """The digest of a model that is whole on one device."""
    frozen = {
        name: local_view(parameter.detach())
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad
    }
    shapes = {name: tuple(part.shape) for name, part in frozen.items()}
    starts = {name: (0,) * len(shape) for name, shape in shapes.items()}
    sums = [int(place_sum(part, shapes[name], starts[name])) for name, part in frozen.items()]
    return combined_digest(shapes, sums)


def check_same_base(here: bytes, saved: bytes, path: str) -> None:
    """UserError: a checkpoint was trained on another base."""
    if here != saved:
        raise UserError(
            f"{path} was trained on a base whose frozen weights have SHA-256 {saved.hex()[:16]};"
            f" those here have {here.hex()[:16]}",
            "the base, the seed and the libraries that the run began with, or a new run with"
            " another --save-dir",
            path,
        )
