"""A task of operations that GPUs compute without a deterministic kernel: --exact refuses it there.

Without --exact it trains on a GPU as on a CPU, to rounding: a golden loss holds it.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from samecurve import Mean

SIZE, CLASSES, SYMBOLS, WRITTEN = 12, 3, 5, 4
Arrays = dict[str, NDArray[Any]]


class Pictures:
    """Noisy pictures with a class for each pixel of a coarse grid, and a word of symbols."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, ids: NDArray[np.int64]) -> Arrays:
        rows = [self.row(i) for i in ids]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def row(self, i: int) -> Arrays:
        random = np.random.default_rng(i)
        pixels = random.integers(0, CLASSES, (4, 4))
        shown = np.kron(pixels, np.ones((3, 3))) + 0.3 * random.standard_normal((SIZE, SIZE))
        word = random.integers(1, SYMBOLS, WRITTEN)
        return {"picture": shown[None].astype(np.float32), "pixels": pixels, "word": word}


class Network(nn.Module):
    """Class logits of each pixel of the grid, and symbol logits of each column."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, width, 3)
        self.pool = nn.AdaptiveAvgPool2d(5)
        self.pixels = nn.Conv2d(width, CLASSES, 2)
        self.pad = nn.ReflectionPad1d(1)
        self.columns = nn.Conv1d(width, SYMBOLS, 3)

    def forward(self, picture: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = F.gelu(self.first(F.pad(picture, (1, 1, 1, 1), mode="reflect")))
        x = F.interpolate(x, size=18, mode="bicubic", align_corners=False)
        x = x + 0.1 * x.cumsum(3)
        rows = self.columns(self.pad(x.mean(2)))
        return self.pixels(self.pool(x)), rows + rows.median(2, keepdim=True).values


class Operations:
    def __init__(self, model: Mapping[str, int], data: Mapping[str, int]) -> None:
        self.fields, self.data = model, data

    def model(self) -> nn.Module:
        return Network(self.fields["width"])

    def loss(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> Mean:
        """The sum of a pixel-wise cross-entropy and of CTC, over pictures."""
        pixels, columns = model(batch["picture"])
        count = len(pixels)
        lengths = torch.tensor([columns.size(2), WRITTEN]).expand(count, 2)  # on the host
        written = columns.permute(2, 0, 1).log_softmax(2)
        of_pixels = F.cross_entropy(pixels, batch["pixels"], reduction="sum")
        of_words = F.ctc_loss(written, batch["word"], lengths[:, 0], lengths[:, 1], reduction="sum")
        return Mean(of_pixels + of_words, count)

    def train_data(self) -> Pictures:
        return Pictures(self.data["samples"])
