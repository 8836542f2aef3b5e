"""A model with a fault to find: one layer adds up parts of its gradient in the order in which
threads happen to finish (docs/exact.md).
"""

import time
from concurrent.futures import ThreadPoolExecutor, as_completed

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from samecurve import Mean

PARTS = 4


class Hurried(torch.autograd.Function):
    """x @ weight.T, whose backward pass shares the rows out among threads."""

    @staticmethod
    def forward(context, x, weight):
        context.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(context, grad):
        x, weight = context.saved_tensors

        def part(rows):
            time.sleep(time.perf_counter_ns() % 5 * 2e-4)  # as long as it takes, on a busy machine
            return grad[rows].T @ x[rows]

        with ThreadPoolExecutor(PARTS) as threads:
            parts = [threads.submit(part, slice(i, None, PARTS)) for i in range(PARTS)]
            total = torch.zeros_like(weight)
            for done in as_completed(
                parts
            ):  # the fault: `for done in parts` always adds in one order
                total += done.result()
        return grad @ weight, total


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second, self.third = (
            nn.Linear(8, width),
            nn.Linear(width, width, bias=False),
            nn.Linear(width, 1),
        )

    def forward(self, x):
        return self.third(F.gelu(Hurried.apply(F.gelu(self.first(x)), self.second.weight)))


class Waves:
    def __len__(self):
        return 512

    def __getitem__(self, ids):
        x = np.sin(np.outer(ids + 1.0, np.arange(1, 9))).astype(np.float32)
        return {"x": x, "y": x.prod(axis=1, keepdims=True)}


class Race:
    def __init__(self, model):
        self.fields = model

    def model(self):
        return Net(**self.fields)

    def loss(self, model, batch):
        return Mean(F.mse_loss(model(batch["x"]), batch["y"], reduction="sum"), len(batch["x"]))

    def train_data(self):
        return Waves()
