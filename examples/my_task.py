"""A model and data of one's own, in one file of ordinary PyTorch: does a point lie in the ring?

samecurve train -f examples/my_task.yaml
"""

import numpy as np
from torch import nn
from torch.utils.data import Dataset

from samecurve import Mean


class Points(Dataset):
    def __init__(self, first, count):
        self.first, self.count = first, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        x = (
            np.random.default_rng(self.first + index).uniform(-1, 1, 2).astype(np.float32)
        )  # a sample follows from its number
        return {"x": x, "inside": int(0.4 < np.hypot(*x) < 0.8)}


class MyTask:
    def __init__(self, model, data):  # the config's own `model:` and `data:` fields
        self.width, self.samples = model["width"], data["samples"]

    def model(self):
        return nn.Sequential(
            nn.Linear(2, self.width),
            nn.GELU(),
            nn.Linear(self.width, self.width),
            nn.GELU(),
            nn.Linear(self.width, 2),
        )

    def loss(self, model, batch):
        logits = model(batch["x"].to(next(model.parameters()).dtype))  # f64 weights want f64 inputs
        return Mean(
            nn.functional.cross_entropy(logits, batch["inside"], reduction="sum"), len(logits)
        )

    def train_data(self):
        return Points(0, self.samples)

    def eval_data(self):
        return Points(self.samples, 200)
