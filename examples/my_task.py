"""A user task in one file of ordinary PyTorch: `samecurve train -f examples/my_task.yaml`."""

import numpy as np
from torch import nn

from samecurve import Mean


class MyTask:
    def __init__(self, model, data):  # the config's own `model:` and `data:` fields
        self.width, self.samples = model["width"], data["samples"]

    def model(self):
        w, gelu = self.width, nn.GELU()
        return nn.Sequential(nn.Linear(2, w), gelu, nn.Linear(w, w), gelu, nn.Linear(w, 2))

    def loss(self, model, batch):
        out = model(batch["x"])
        return Mean(nn.functional.cross_entropy(out, batch["label"], reduction="sum"), len(out))

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
        return {"x": x, "label": (np.abs(np.hypot(*x.T) - 0.6) < 0.2).astype(np.int64)}
