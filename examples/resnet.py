"""A small ResNet: its BatchNorm takes the statistics of the whole step, on any devices."""

import numpy as np
import torch.nn.functional as F
from torch import nn

from samecurve import Mean


class Stripes:
    """Noisy pictures of 16 x 16; the label is the direction of the stripes."""

    def __init__(self, first, count):
        self.first, self.count = first, count

    def __len__(self):
        return self.count

    def __getitem__(self, ids):
        numbers = np.asarray(ids) + self.first
        return {"picture": np.stack([self.picture(i) for i in numbers]), "label": numbers % 4}

    def picture(self, i):
        random, (y, x) = np.random.default_rng(i), np.mgrid[:16, :16]
        wave = np.sin([x, y, x + y, x - y][i % 4] + random.uniform(0, 2 * np.pi))
        return np.float32(wave + random.standard_normal((16, 16)))[None]


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x):
        inner = F.relu(self.norms[0](self.first(x)))
        return F.relu(x + self.norms[1](self.second(inner)))


class ResNet(nn.Sequential):
    def __init__(self, width, depth):
        blocks = [Block(width) for _ in range(depth)]
        lift = nn.Conv2d(1, width, 3, stride=2, padding=1)
        super().__init__(lift, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 4))


class Directions:
    def __init__(self, model, data):
        self.fields, self.data = model, data

    def model(self):
        return ResNet(**self.fields)

    def loss(self, model, batch):
        logits = model(batch["picture"])
        return Mean(F.cross_entropy(logits, batch["label"], reduction="sum"), len(logits))

    def train_data(self):
        return Stripes(0, self.data["samples"])
