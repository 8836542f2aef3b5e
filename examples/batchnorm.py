"""Which corner has the bright spot? BatchNorm mixes samples: Samecurve finds it, and says so."""

import numpy as np
from torch import nn
from torch.nn.functional import cross_entropy

from samecurve import Mean

SIZE, CLASSES = 16, 4


class Corners:
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
    convolution = nn.Conv2d(inside, outside, 3, stride=2, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outside), nn.ReLU())


class Network(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        sizes = [1, *(width << i for i in range(depth))]
        self.stages = nn.Sequential(*map(stage, sizes, sizes[1:]))
        self.head = nn.Linear((width << depth - 1) * (SIZE >> depth) ** 2, CLASSES)

    def forward(self, picture):
        x = self.stages(picture)
        return self.head(x.flatten(1))


class Convolutional:
    def __init__(self, model, data):
        self.fields, self.data = model, data

    def model(self):
        return Network(**self.fields)

    def loss(self, model, batch):
        logits, labels = model(batch["picture"]), batch["label"]
        return Mean(cross_entropy(logits, labels, reduction="sum"), len(labels))

    def train_data(self):
        return Corners(self.data["samples"])
