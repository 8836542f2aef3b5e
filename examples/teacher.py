"""A momentum teacher: the student learns from few labels and from its own slow average."""

import copy

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from samecurve import Mean


class Halves:  # noisy points on two lines; one in ten has its label, the others -1
    def __len__(self):
        return 2000

    def __getitem__(self, ids):
        x = np.stack([np.random.default_rng(i).normal(size=2) for i in ids])
        side = np.asarray(ids) % 2
        x[:, 1] = np.sin(2 * x[:, 0]) + side - 0.5 + 0.2 * x[:, 1]
        label = np.where(np.asarray(ids) // 2 % 10 == 0, side, -1)
        return {"x": x.astype(np.float32), "side": side, "label": label}


class Pair(nn.Module):
    def __init__(self, width):
        super().__init__()
        first, second = nn.Linear(2, width), nn.Linear(width, width)
        self.student = nn.Sequential(first, nn.GELU(), second, nn.GELU(), nn.Linear(width, 2))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)


class MeanTeacher:
    def model(self):
        return Pair(width=32)

    def loss(self, model, batch):
        x = batch["x"]
        logits = model.student(x + 0.1 * torch.randn_like(x))
        with torch.no_grad():
            wanted = model.teacher(x + 0.1 * torch.randn_like(x)).softmax(1)
        labels = F.cross_entropy(logits, batch["label"], ignore_index=-1, reduction="sum")
        agreement = (logits.softmax(1) - wanted).square().sum()
        return Mean(labels + agreement, len(x))

    def after_step(self, model, step):
        momentum = min(0.99, (1 + step) / (10 + step))
        for slow, fast in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
            slow.lerp_(fast, 1 - momentum)

    def metrics(self, model, batch):
        chosen = model.teacher(batch["x"]).argmax(1)
        return {"accuracy": Mean((chosen == batch["side"]).sum(), len(chosen))}

    def train_data(self):
        return Halves()

    eval_data = train_data  # judged by the sides of all
