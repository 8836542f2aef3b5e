"""A user task in one file of ordinary PyTorch: `samecurve train -f examples/my_task.yaml`."""

import numpy as np
from torch import nn
from torch.nn.functional import cross_entropy

from samecurve import Mean


class Points(list):
    """Points of a plane by their numbers; the label says whether one lies in the ring."""

    def __getitem__(self, ids):
        x = np.float32([np.random.default_rng(i).uniform(-1, 1, 2) for i in np.take(self, ids)])
        radius = np.hypot(x[:, 0], x[:, 1])
        return {"x": x, "inside": ((radius > 0.4) & (radius < 0.8)).astype(np.int64)}


class MyTask:
    def __init__(self, model, data):  # the config's own `model:` and `data:` fields
        self.width, self.samples = model["width"], data["samples"]

    def model(self):
        inner = [nn.Linear(2, self.width), nn.GELU(), nn.Linear(self.width, self.width), nn.GELU()]
        return nn.Sequential(*inner, nn.Linear(self.width, 2))

    def loss(self, model, batch):
        logits = model(batch["x"].to(next(model.parameters()).dtype))  # f64 weights want f64 inputs
        return Mean(cross_entropy(logits, batch["inside"], reduction="sum"), len(logits))

    def train_data(self):
        return Points(range(self.samples))

    def eval_data(self):
        return Points(range(self.samples, self.samples + 200))
