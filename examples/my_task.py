"""A user task in one file of ordinary PyTorch: `samecurve train -f examples/my_task.yaml`."""

import numpy as np
from torch import nn
from torch.nn.functional import cross_entropy

from samecurve import Mean


class MyTask:
    def __init__(self, model, data):  # the config's own `model:` and `data:` fields
        self.width, self.samples = model["width"], data["samples"]

    def model(self):
        return nn.Sequential(nn.Linear(2, self.width), nn.GELU(), nn.Linear(self.width, 2))

    def loss(self, model, batch):
        logits = model(batch["x"].to(next(model.parameters()).dtype))
        return Mean(cross_entropy(logits, batch["inside"], reduction="sum"), len(logits))

    def train_data(self):
        return Points(0, self.samples)

    def eval_data(self):
        return Points(self.samples, 200)


class Points:  # of a plane; the label says whether one lies in the ring
    def __init__(self, first, count):
        self.first, self.count = first, count

    def __len__(self):
        return self.count

    def __getitem__(self, ids):  # the same id gives the same row, whenever it is read
        x = np.float32([np.random.default_rng(self.first + i).uniform(-1, 1, 2) for i in ids])
        return {"x": x, "inside": (np.abs(np.hypot(*x.T) - 0.6) < 0.2).astype(np.int64)}
