"""Noisy waves told apart by their direction and frequency: complex weights beside real ones."""

import numpy as np
import torch
from torch import nn

from samecurve import Mean


class Waves(torch.utils.data.Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        random, (y, x) = np.random.default_rng(i), np.mgrid[:16, :16] * np.pi / 8
        wave = np.sin([2, 3][i % 2] * (x if i % 4 < 2 else y) + random.uniform(0, 2 * np.pi))
        return {"picture": np.float32(wave + random.standard_normal((16, 16))), "label": i % 4}


class Filter(nn.Module):  # a complex factor for each channel and frequency
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, 16, 9, dtype=torch.complex64))

    def forward(self, x):
        return torch.fft.irfft2(torch.fft.rfft2(x.to(self.weight.real.dtype)) * self.weight)


class Classifier(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.lift, self.head = nn.Conv2d(1, width, 1), nn.Linear(width, 4)
        self.blocks = nn.ModuleList()
        for _ in range(depth):
            self.blocks.append(nn.Sequential(Filter(width), nn.Conv2d(width, width, 1), nn.GELU()))

    def forward(self, picture):
        x = self.lift(picture[:, None])
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.square().mean((2, 3)))  # power: a wave's mean is zero


class Spectral:
    def __init__(self, model, data):
        self.fields, self.data = model, data

    def model(self):
        return Classifier(**self.fields)

    def loss(self, model, batch):
        logits, labels = model(batch["picture"]), batch["label"]
        return Mean(nn.functional.cross_entropy(logits, labels, reduction="sum"), len(labels))

    def train_data(self):
        return Waves(self.data["samples"])
