"""MoCo: a picture finds its other view among the keys of earlier batches, kept in a queue."""

import copy

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from samecurve import Mean

BATCH, QUEUE = 64, 512


class Views:
    def __len__(self):
        return 2000

    def __getitem__(self, ids):
        picture, *noise = np.stack([np.random.default_rng(i).normal(size=(3, 16)) for i in ids], 1)
        one, two = ((picture + 0.3 * each).astype(np.float32) for each in noise)
        return {"one": one, "two": two}


class Encoders(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.queue = nn.Parameter(F.normalize(torch.randn(QUEUE, 8)))  # a row a key


class MoCo:
    phases, elementwise = {"contrast": "query.*", "enqueue": "queue"}, True
    model, train_data = Encoders, Views

    def features(self, model, batch, step, phase):
        keys = F.normalize(model.key(batch["two"]))
        if phase == "enqueue":  # the oldest rows of the queue, and what replaces them
            rows = (step * BATCH + torch.arange(BATCH, device=keys.device)) % QUEUE
            return {"key": keys, "oldest": model.queue[rows].expand(len(keys), -1, -1)}
        queries = F.normalize(model.query(batch["one"]))
        right, wrong = (queries * keys).sum(1, keepdim=True), queries @ model.queue.detach().T
        return {"loss": -F.log_softmax(torch.cat([right, wrong], 1) / 0.2, 1)[:, 0]}

    def batch_loss(self, features, phase):
        if phase == "contrast":
            return Mean(features["loss"].sum(), len(features["loss"]))
        difference = features["oldest"][0, : len(features["key"])] - features["key"]
        return Mean(0.5 * difference.square().sum() * len(difference), len(difference))

    def optimizer(self, params, lr, phase):  # a rate of 1 replaces the oldest rows
        kind = torch.optim.SGD if phase == "enqueue" else torch.optim.AdamW
        return kind(params, lr=1.0 if phase == "enqueue" else lr)

    def after_step(self, model, step):
        momentum = min(0.99, (1 + step) / (10 + step))
        for slow, fast in zip(model.key.parameters(), model.query.parameters(), strict=True):
            slow.lerp_(fast, 1 - momentum)
