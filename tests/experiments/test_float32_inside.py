"""`verify` of models that cast to float32 themselves, whatever the run's precision."""

from pathlib import Path

import pytest

from one_curve import compare
from tiny import config_of
from worlds import Pool

ROWS = """
import numpy as np

from samecurve import Mean


class Rows:
    def __len__(self):
        return 40

    def __getitem__(self, ids):
        draws = [np.random.default_rng(int(i)) for i in ids]
        x = np.stack([draw.normal(size=(6, 5)) for draw in draws])
        words = np.stack([draw.integers(0, 20, 6) for draw in draws])
        return {"x": x, "words": words, "y": ids * 7 % 3}
"""
TORCH = """
import torch
import torch.nn.functional as F
from torch import nn


class StateSpace(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(5, 8), nn.Linear(8, 3)
        self.A_log = nn.Parameter(torch.linspace(0, 1, 8))

    def forward(self, x):
        hidden, state = torch.tanh(self.inner(x)), 0
        for step in range(x.shape[1]):
            state = state * torch.exp(-torch.exp(self.A_log.float())) + hidden[:, step]
        return self.head(state.to(x.dtype))


class Task:
    def model(self):
        return StateSpace()

    def loss(self, model, batch):
        error = F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")
        return Mean(error, len(batch["y"]))

    def train_data(self):
        return Rows()
"""
FLAX = """
import jax.numpy as jnp
import optax
from flax import nnx


class Words(nnx.Module):
    def __init__(self, rngs):
        self.table, self.head = nnx.Embed(20, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, words):
        return self.head(jnp.tanh(self.table(words)).mean(1))


class Task:
    def model(self, rngs):
        return Words(rngs)

    def loss(self, model, batch):
        out = model(batch["words"])
        error = optax.softmax_cross_entropy_with_integer_labels(out, batch["y"])
        return Mean(error.sum(), len(out))

    def train_data(self):
        return Rows()
"""


CODE = {"torch": ROWS + TORCH, "jax": ROWS + FLAX}
CAST = {"torch": "self.A_log.float()", "jax": "self.table(words)"}


@pytest.mark.parametrize(
    ("engine", "layout"),
    [
        ("torch", "ddp:2"),
        pytest.param("jax", "jax:2", marks=pytest.mark.long),  # compiles for seconds
    ],
)
def test_what_the_model_casts_itself_is_told_and_no_failure(
    engine: str, layout: str, pool: Pool, tmp_path: Path
) -> None:
    code = CODE[engine]
    (tmp_path / "task.py").write_text(code)
    config = config_of(
        {
            "task": f"{tmp_path}/task.py:Task",
            "engine": engine,
            "batch": {"samples": 8},
            "optimizer": {"lr": 1e-2},
            "train": {"steps": 6, "precision": "f64"},
            "devices": {"use": "cpu"},
        }
    )
    (verdict,) = compare(config, [layout], pool, tmp_path / "runs", steps=6, near=1e-10)
    assert 1e-10 < verdict.worst < 1e-6
    assert verdict.verdict == "PASS"
    line = code[: code.index(CAST[engine])].count("\n") + 1
    assert f"task.py:{line}: " in verdict.culprit
    assert "computes in float32 in an f64 run" in verdict.culprit
