"""Two losses as people bring them, in a file of their own as a user's are: DPO, and an
energy-based model with a gradient penalty.
"""

from copy import deepcopy
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from samecurve import Mean

VOCAB, WIDTH, LENGTH, SAMPLES = 11, 8, 6, 25
BETA = 0.5
PENALTY, REGULAR = 2.0, 0.1


class Pairs:
    """Answers of unlike length, one chosen and one rejected; padding is -1."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, ids: Any) -> dict[str, Any]:
        columns: dict[str, list[Any]] = {"chosen": [], "rejected": []}
        for sample in ids:
            random = np.random.default_rng(int(sample))
            for answers in columns.values():
                answer = np.full(LENGTH, -1)
                length = random.integers(2, LENGTH + 1)
                answer[:length] = random.integers(0, VOCAB, length)
                answers.append(answer)
        return {name: np.stack(answers) for name, answers in columns.items()}


class Reader(nn.Module):
    """The logits of each next token, from the tokens so far."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens).cumsum(1)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)  # type: ignore[no-any-return]


class Tuned(nn.Module):
    """A policy, and the model that it was before; both begin as the same."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = Reader()
        self.reference = deepcopy(self.policy).requires_grad_(False)


def log_likelihood(model: nn.Module, answers: torch.Tensor) -> torch.Tensor:
    """The log-likelihood of each row's answer; its first token is the prompt."""
    logits, labels = model(answers[:, :-1].clamp(min=0)), answers[:, 1:]
    losses = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-1, reduction="none")
    return -losses.sum(1)


class DPO:
    def model(self) -> nn.Module:
        return Tuned()

    def train_data(self) -> Pairs:
        return Pairs()

    def loss(self, model: Any, batch: Any) -> Mean:
        ratio = {}
        for name in ("chosen", "rejected"):
            with torch.no_grad():
                before = log_likelihood(model.reference, batch[name])
            ratio[name] = log_likelihood(model.policy, batch[name]) - before
        losses = -F.logsigmoid(BETA * (ratio["chosen"] - ratio["rejected"]))
        return Mean(losses.sum(), len(losses))


class Points:
    """Points of the data, others that are none, and a place between the two."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, ids: Any) -> dict[str, Any]:
        randoms = [np.random.default_rng(int(sample)) for sample in ids]
        return {
            "x": np.stack([random.normal(1.0, 0.5, WIDTH) for random in randoms]),
            "other": np.stack([random.normal(size=WIDTH) for random in randoms]),
            "place": np.stack([random.uniform(size=1) for random in randoms]),
        }


class Energy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.silu(layer(x))
        return self.head(x)[:, 0]  # type: ignore[no-any-return]


class Energies:
    """Low energy for data, high for the others; slopes of 1 between them."""

    def model(self) -> nn.Module:
        return Energy()

    def train_data(self) -> Points:
        return Points()

    def loss(self, model: Any, batch: Any) -> Mean:
        x, other, place = batch["x"], batch["other"], batch["place"]
        low, high = model(x), model(other)
        between = (place * x + (1 - place) * other).requires_grad_()
        (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
        penalty = (slope.norm(dim=1) - 1) ** 2
        losses = low - high + REGULAR * (low**2 + high**2) + PENALTY * penalty
        return Mean(losses.sum(), len(losses))
