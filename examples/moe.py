"""A mixture of experts, balanced over the whole batch, not over what one device sees of it."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from samecurve import Mean


class Sums:
    """Sequences of six digits; each position is to tell the sum so far, modulo 10."""

    def __len__(self):
        return 2000

    def __getitem__(self, ids):
        digits = np.stack([np.random.default_rng(i).integers(0, 10, 6) for i in ids])
        return {"digits": digits, "sums": digits.cumsum(1) % 10}


class Experts(nn.Module):  # each position goes through the one that the router chooses
    def __init__(self, width, experts):
        super().__init__()
        self.embed, self.past = nn.Embedding(10, width), nn.GRU(width, width, batch_first=True)
        self.router, self.head = nn.Linear(width, experts), nn.Linear(width, 10)
        self.first = nn.Parameter(torch.randn(experts, width, 2 * width) * width**-0.5)
        self.second = nn.Parameter(torch.randn(experts, 2 * width, width) * width**-0.5 / 2)

    def forward(self, digits):
        x, _ = self.past(self.embed(digits))
        chances = self.router(x).softmax(-1)
        chosen = F.one_hot(chances.argmax(-1), chances.shape[-1]).to(x)
        hidden = F.gelu(torch.einsum("ntd,edh->nteh", x, self.first))
        out = torch.einsum("nteh,ehd,nte->ntd", hidden, self.second, chosen * chances)
        return self.head(x + out), chances, chosen


class Mixture:
    def __init__(self, model):
        self.fields = model

    def model(self):
        return Experts(**self.fields)

    def features(self, model, batch):  # a row for each sample
        logits, chances, chosen = model(batch["digits"])
        error = F.cross_entropy(logits.transpose(1, 2), batch["sums"], reduction="none")
        return {"error": error.mean(1), "chances": chances.mean(1), "chosen": chosen.mean(1)}

    def batch_loss(self, features):  # over all samples of the step
        count, experts = features["chosen"].shape
        balance = experts * (features["chosen"].mean(0) * features["chances"].mean(0)).sum()
        return Mean(features["error"].sum() + 0.01 * count * balance, count)

    def train_data(self):
        return Sums()
