"""A small convolutional network with BatchNorm, which mixes the samples of a batch: Samecurve finds
it, and says what to do about it.
"""

import numpy as np
import torch.nn.functional as F
from torch import nn

from samecurve import Mean

SIZE, CLASSES = 16, 4


class Corners:
    """Noise with a bright spot in one quarter, which is the label.

    Rows by id: each picture follows from its id alone.
    """

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, ids):
        pictures = np.stack(
            [np.random.default_rng(i).standard_normal((1, SIZE, SIZE)) for i in ids]
        )
        for picture, i in zip(pictures, ids, strict=True):
            y, x = SIZE // 2 * (i % CLASSES // 2) + i % 5, SIZE // 2 * (i % 2) + i % 3
            picture[0, y : y + 4, x : x + 4] += 2
        return {"picture": pictures.astype(np.float32), "label": ids % CLASSES}


def stage(inside, outside):
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(outside),
        nn.ReLU(),
    )


class Network(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.stages = nn.ModuleList(
            stage(1 if i == 0 else width << i - 1, width << i) for i in range(depth)
        )
        self.head = nn.Linear((width << depth - 1) * (SIZE >> depth) ** 2, CLASSES)

    def forward(self, picture):
        x = picture.to(self.head.weight.dtype)
        for part in self.stages:
            x = part(x)
        return self.head(x.flatten(1))


class Convolutional:
    def __init__(self, model, data):
        self.fields, self.data = model, data

    def model(self):
        return Network(**self.fields)

    def loss(self, model, batch):
        return Mean(
            F.cross_entropy(model(batch["picture"]), batch["label"], reduction="sum"),
            len(batch["label"]),
        )

    def train_data(self):
        return Corners(self.data["samples"])
