"""A call of each operation without a deterministic kernel on GPUs, and calls that are near to it.

The tensors lie on torch's default device as this module is imported, and as a call is made.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

Tensor = torch.Tensor


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def unpooled(dimensions: int) -> Tensor:
    pool, unpool = getattr(F, f"max_pool{dimensions}d"), getattr(F, f"max_unpool{dimensions}d")
    values, places = pool(floats(1, 2, *[4] * dimensions), 2, return_indices=True)
    result: Tensor = unpool(values, places, 2)
    return result


INDEX = torch.tensor([0, 1, 1])
# for each row of the table a call of it, by its words
CALLS: dict[str, Callable[[], Tensor]] = {
    "AdaptiveAvgPool2d": lambda: nn.AdaptiveAvgPool2d(2)(floats(1, 2, 5, 5)),
    "AdaptiveAvgPool3d": lambda: nn.AdaptiveAvgPool3d(2)(floats(1, 2, 5, 5, 5)),
    "AdaptiveMaxPool2d": lambda: nn.AdaptiveMaxPool2d(2)(floats(1, 2, 5, 5)),
    "AvgPool3d": lambda: nn.AvgPool3d(2)(floats(1, 2, 4, 4, 4)),
    "FractionalMaxPool2d": lambda: nn.FractionalMaxPool2d(2, 2)(floats(1, 2, 5, 5)),
    "FractionalMaxPool3d": lambda: nn.FractionalMaxPool3d(2, 2)(floats(1, 2, 5, 5, 5)),
    "MaxUnpool2d": lambda: unpooled(2),
    "MaxUnpool3d": lambda: unpooled(3),
    "ReflectionPad1d": lambda: nn.ReflectionPad1d(1)(floats(1, 2, 5)),
    "ReflectionPad3d": lambda: nn.ReflectionPad3d(1)(floats(1, 2, 5, 5, 5)),
    "interpolate(mode='linear')": lambda: F.interpolate(floats(1, 2, 5), 7, mode="linear"),
    "interpolate(mode='bicubic')": lambda: F.interpolate(floats(1, 2, 5, 5), 7, mode="bicubic"),
    "interpolate(mode='bilinear', antialias=True)": lambda: F.interpolate(
        floats(1, 2, 5, 5), 3, mode="bilinear", antialias=True
    ),
    "interpolate(mode='bicubic', antialias=True)": lambda: F.interpolate(
        floats(1, 2, 5, 5), 3, mode="bicubic", antialias=True
    ),
    "grid_sample": lambda: F.grid_sample(
        floats(1, 2, 5, 5), torch.rand(1, 3, 3, 2), align_corners=False
    ),
    "grid_sample of volumes": lambda: F.grid_sample(
        floats(1, 2, 5, 5, 5), torch.rand(1, 3, 3, 3, 3), align_corners=False
    ),
    "cross_entropy of images or sequences": lambda: F.cross_entropy(
        floats(2, 3, 4, 4), torch.zeros(2, 4, 4, dtype=torch.long), reduction="sum"
    ),
    "ctc_loss": lambda: F.ctc_loss(
        floats(8, 2, 5).log_softmax(-1),
        torch.ones(2, 3, dtype=torch.long),
        torch.tensor([8, 8]),
        torch.tensor([3, 3]),
    ),
    "EmbeddingBag(mode='max')": lambda: nn.EmbeddingBag(5, 3, mode="max")(INDEX[None]),
    "put_": lambda: floats(5).clone().put_(INDEX, torch.ones(3)),
    "take": lambda: floats(2, 5).take(INDEX),
    "index_reduce": lambda: floats(5).clone().index_reduce_(0, INDEX, torch.ones(3), "prod"),
    "scatter_reduce(reduce='prod')": lambda: floats(5).scatter_reduce(
        0, INDEX, torch.ones(3), "prod"
    ),
    "scatter(reduce=...)": lambda: torch.randn(5).scatter(0, INDEX, torch.ones(3), reduce="add"),
    "median(dim)": lambda: floats(2, 5).median(1).values,
    "nanmedian(dim)": lambda: floats(2, 5).nanmedian(1).values,
    "bincount(weights=...)": lambda: torch.bincount(INDEX, torch.ones(3)),
    "histc": lambda: torch.randn(5).histc(3),
}
# near to the table, and not in it: a deterministic kernel is there, or torch replaces the call
HARMLESS: dict[str, Callable[[], Tensor]] = {
    "one mean": lambda: nn.AdaptiveAvgPool2d(1)(floats(1, 2, 5, 5)),
    "labels of samples": lambda: F.cross_entropy(floats(4, 3), INDEX.new_zeros(4)),
    "images without a sum": lambda: F.cross_entropy(
        floats(2, 3, 4, 4), torch.zeros(2, 4, 4, dtype=torch.long), reduction="none"
    ).sum(),
    "pixels in, no gradient": lambda: nn.ReflectionPad1d(1)(torch.randn(1, 2, 5)),
    "reflected images": lambda: nn.ReflectionPad2d(1)(floats(1, 2, 5, 5)),
    "replicated": lambda: nn.ReplicationPad2d(1)(floats(1, 2, 5, 5)),
    "bilinear": lambda: F.interpolate(floats(1, 2, 5, 5), 7, mode="bilinear"),
    "running sum": lambda: floats(5).cumsum(0),
    "median of all": lambda: floats(5).median(),
    "counts": lambda: torch.bincount(INDEX),
    "means of bags": lambda: nn.EmbeddingBag(5, 3, mode="mean")(INDEX[None]),
    "sums by index": lambda: floats(5).scatter_reduce(0, INDEX, torch.ones(3), "sum"),
    "largest": lambda: nn.MaxPool2d(2)(floats(1, 2, 4, 4)),
}
