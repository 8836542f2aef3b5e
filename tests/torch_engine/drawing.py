"""Models that draw random numbers in every way that people write, in a file of its own as a user's
is: nothing here knows of keys.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn, randn_like
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

from samecurve import Mean

WIDTH, LENGTH = 6, 5


class Source:
    def __len__(self) -> int:
        return 40

    def __getitem__(self, ids: Any) -> dict[str, Any]:
        rows = [np.random.default_rng(int(i)).normal(size=(LENGTH, WIDTH)) for i in ids]
        return {"x": np.stack(rows), "y": np.stack(rows).sum((1, 2))}


class Functional(nn.Module):
    """F.dropout, a name imported, a weight's noise and a coefficient of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(torch.tanh(self.first(x)), 0.3, training=self.training)
        x = dropout(self.second(x), 0.2, self.training)
        return x * (1 + torch.rand((), dtype=x.dtype))


class Noisy(nn.Module):
    """A VAE's noise, drawn in place and alike; a drawn path; Gumbel noise."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.spread = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, spread = self.mean(x), F.softplus(self.spread(x))
        x = mean + spread * randn_like(mean) + spread * torch.empty_like(mean).uniform_()
        x = x + torch.distributions.Normal(mean, spread).rsample()
        kept = torch.bernoulli(torch.full((len(x), 1, 1), 0.8, dtype=x.dtype))
        return x * kept + F.gumbel_softmax(x)


class Sequences(nn.Module):
    """Both layouts of recurrent layers, and attention with and without its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.3, batch_first=True)
        self.gru = nn.GRU(WIDTH, WIDTH // 2, 2, dropout=0.3, bidirectional=True)
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.lstm(x)[0]
        x = x + self.gru(x.transpose(0, 1))[0].transpose(0, 1)
        x = x + self.attention(x, x, x, need_weights=False)[0] + self.attention(x, x, x)[0]
        return x + F.scaled_dot_product_attention(x, x, x, dropout_p=0.2 * self.training)


class Everything(nn.Module):
    """The blocks, two of them computed again in backward, by either kind of checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Functional(), Noisy(), Sequences(), Functional(), Noisy()])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third, again, last = self.blocks
        x = third(second(first(x)))
        if self.training:
            x = checkpoint(again, x, use_reentrant=False)
            return self.head(checkpoint(last, x, use_reentrant=False)).sum((1, 2))  # type: ignore[no-any-return]
        return self.head(last(again(x))).sum((1, 2))  # type: ignore[no-any-return]


class Draws:
    """The loss draws too."""

    def model(self) -> nn.Module:
        return Everything().double()

    def loss(self, model: Any, batch: Any) -> Mean:
        x = batch["x"] + 0.1 * torch.randn_like(batch["x"])
        scale = 1 + torch.rand(len(x), dtype=x.dtype)
        weight = 1 + torch.randint(0, 3, (len(x),))
        losses = (model(x) * scale - batch["y"]).square() * weight
        return Mean(losses.sum(), len(x))

    def train_data(self) -> Source:
        return Source()

    def eval_data(self) -> Source:
        return Source()


class Plain(Draws):
    """A mask and noise, which a test computes by hand."""

    def model(self) -> nn.Module:
        return nn.ModuleList([nn.Linear(WIDTH, 8), nn.Linear(8, 1)]).double()

    def loss(self, model: Any, batch: Any) -> Mean:
        x = batch["x"] + 0.1 * torch.randn_like(batch["x"])
        x = F.dropout(torch.tanh(model[0](x)), 0.3, training=model.training)
        losses = (model[1](x).sum((1, 2)) - batch["y"]).square()
        return Mean(losses.sum(), len(x))
