"""Tasks whose loops are not the plainest, in a file of their own as a user's are."""

from typing import Any

import numpy as np
from torch import nn

from samecurve import Mean

SAMPLES = 23  # in tens: an epoch's tail of 3


class Rows:
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, ids: Any) -> dict[str, Any]:
        x = np.stack([np.random.default_rng(int(i)).normal(size=6) for i in ids])
        return {"x": x, "y": np.tanh(x.sum(1)), "weight": 1.0 + ids % 3}


class Base:
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def train_data(self) -> Rows:
        return Rows()


class Annealed(Base):
    """A penalty that comes with the steps and goes with the epochs; logged beside the loss, as is
    what only some samples count for.
    """

    fault = False  # it forgets one of them

    def loss(self, model: Any, batch: Any, step: int, epoch: int) -> dict[str, Mean]:
        out, weight = model(batch["x"])[:, 0], batch["weight"]
        share = min(1.0, step / 6) * 0.5**epoch
        error = (out - batch["y"]) ** 2 + share * out**2
        means = {
            "penalty": Mean((weight * out**2).sum(), weight.sum()),
            "above": Mean(out[out > 0].sum(), (out > 0).sum()),
        }
        if self.fault and len(out) == 3:
            del means["above"]
        return {**means, "loss": Mean((weight * error).sum(), weight.sum())}

    def eval_data(self) -> Rows:
        return Rows()


class Forgetful(Annealed):
    fault = True
