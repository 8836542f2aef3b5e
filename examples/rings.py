"""A ring or not: examples/plain_ddp.py as a task.

Points are drawn once, after the seed is set, the same in every process.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from samecurve import Mean


class Rings:
    def model(self):
        return nn.Sequential(
            nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 2)
        )

    def train_data(self):
        x = torch.rand(1000, 2) * 2 - 1
        radius = x.norm(dim=1)
        return TensorDataset(x, ((radius > 0.4) & (radius < 0.8)).long())

    def loss(self, model, batch):
        logits = model(batch["0"])
        return Mean(F.cross_entropy(logits, batch["1"], reduction="sum"), len(batch["1"]))
