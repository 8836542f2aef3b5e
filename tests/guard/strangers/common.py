"""What the cases share: a small classifier and its rows. The last step of an epoch is short."""

import numpy as np
import torch.nn.functional as F
from torch import nn

from samecurve import Mean

SAMPLES = 37  # in steps of 8


class Rows:
    def __init__(self, first=0, count=SAMPLES):
        self.first, self.count = first, count

    def __len__(self):
        return self.count

    def __getitem__(self, ids):
        draws = [np.random.default_rng(int(self.first + i)) for i in ids]
        return {
            "x": np.stack([draw.normal(size=8) for draw in draws]),
            "y": np.array([draw.integers(0, 3) for draw in draws]),
            "id": np.asarray(ids),
        }


def net():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def summed(out, y):
    return F.cross_entropy(out, y, reduction="sum")


class Base:
    def model(self):
        return net()

    def loss(self, model, batch):
        out = model(batch["x"])
        return Mean(summed(out, batch["y"]), len(out))

    def train_data(self):
        return Rows()

    def eval_data(self):
        return Rows(1000, 8)
