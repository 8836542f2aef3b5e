"""Two towers and a contrastive loss with a learned temperature; its data: pairs of noisy views."""

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from samecurve import Mean

FIELDS, WIDTH, DEPTH = 64, 256, 4


class Pairs:
    def __init__(self) -> None:
        drawn = np.random.default_rng(0)
        one = drawn.standard_normal((4096, FIELDS))
        other = one + drawn.standard_normal((4096, FIELDS))
        self.rows = {"one": one.astype(np.float32), "two": other.astype(np.float32)}

    def __len__(self) -> int:
        return len(self.rows["one"])

    def __getitem__(self, ids: NDArray[np.int64]) -> dict[str, NDArray[np.generic]]:
        return {name: rows[ids] for name, rows in self.rows.items()}


def tower() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(DEPTH)]
    return nn.Sequential(nn.Linear(FIELDS, WIDTH), *blocks, nn.Linear(WIDTH, 32))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = tower(), tower()
        self.scale = nn.Parameter(torch.tensor(1.5))


class Towers:
    def model(self) -> nn.Module:
        return Net()

    def features(self, model: Net, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        rows = {name: batch[name].to(model.scale.dtype) for name in ("one", "two")}
        one, two = F.normalize(model.one(rows["one"])), F.normalize(model.two(rows["two"]))
        return {"one": one, "two": two, "scale": model.scale.exp().expand(len(one))}

    def batch_loss(self, features: dict[str, torch.Tensor]) -> Mean:
        logits = features["scale"][:, None] * features["one"] @ features["two"].T
        pairs = torch.arange(len(logits))
        both = [F.cross_entropy(side, pairs, reduction="sum") for side in (logits, logits.T)]
        return Mean((both[0] + both[1]) / 2, len(logits))

    def train_data(self) -> Pairs:
        return Pairs()
