"""Waves told apart by a model that filters frequencies: complex weights (reduced as pairs of real
numbers) beside real ones.
"""

import numpy as np
import torch
from torch import nn

from samecurve import Mean


class Waves(torch.utils.data.Dataset):
    """Noisy waves of random phase, labelled by direction and frequency.

    A picture follows from its number alone.
    """

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        random, (y, x) = np.random.default_rng(i), np.mgrid[:16, :16] * np.pi / 8
        wave = np.sin([2, 3][i % 2] * (x if i % 4 < 2 else y) + random.uniform(0, 2 * np.pi))
        return {
            "picture": (wave + random.standard_normal((16, 16))).astype(np.float32),
            "label": i % 4,
        }


class Filter(nn.Module):
    # A complex factor for each channel and frequency of 16x16 pixels. Complex weights only: fsdp
    # shards them apart from real ones.
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, 16, 9, dtype=torch.complex64))

    def forward(self, x):
        return torch.fft.irfft2(torch.fft.rfft2(x.to(self.weight.real.dtype)) * self.weight)


class Classifier(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.lift, self.head = nn.Conv2d(1, width, 1), nn.Linear(width, 4)
        self.blocks = nn.ModuleList(
            nn.Sequential(Filter(width), nn.Conv2d(width, width, 1), nn.GELU())
            for _ in range(depth)
        )

    def forward(self, picture):
        x = self.lift(picture[:, None].to(self.lift.weight.dtype))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.square().mean((2, 3)))  # power: a wave's mean is zero


class Spectral:
    def __init__(self, model, data):
        self.fields, self.data = model, data

    def model(self):
        return Classifier(**self.fields)

    def loss(self, model, batch):
        return Mean(
            nn.functional.cross_entropy(model(batch["picture"]), batch["label"], reduction="sum"),
            len(batch["label"]),
        )

    def train_data(self):
        return Waves(self.data["samples"])
