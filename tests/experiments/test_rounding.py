"""`verify --rounding`: after how many steps the last digit of one weight shows in the loss."""

import json
from pathlib import Path
from typing import Any

import pytest

from samecurve.errors import UserError
from samecurve.experiments.layout_runner import LayoutRunner
from samecurve.experiments.verify.rounding import (
    FAR,
    Rounding,
    measure_rounding,
    rounding_json,
    rounding_line,
)
from samecurve.run.describe import describe
from tiny import MACHINE, config_of, tiny_values
from worlds import Pool


def runner_of(pool: Pool, home: Path, values: dict[str, Any]) -> LayoutRunner:
    config = config_of(values)
    facts = describe(config)
    return LayoutRunner(config, MACHINE, facts, steps=None, kind="cpu", pool=pool, home=home)


CHAOTIC = """
import numpy as np
import torch
from torch import nn

from samecurve import Mean


class Points:
    def __len__(self):
        return 100

    def __getitem__(self, ids):
        return {"x": np.random.default_rng(0).uniform(size=(100, 1)).astype(np.float32)[ids]}


class Chaotic:
    # a loss that looks at the weight many doublings later
    def model(self):
        return nn.Linear(1, 1)

    def loss(self, model, batch):
        value = torch.sigmoid(model(batch["x"]))
        for _ in range(30):
            value = 3.9 * value * (1 - value)
        return Mean(value.sum(), len(value))

    def train_data(self):
        return Points()
"""


@pytest.mark.long
def test_a_calm_model_is_told_how_far_a_digit_gets(
    pool: Pool, corpus: Path, tmp_path: Path
) -> None:
    values = tiny_values(corpus, train={"steps": 30, "precision": "f32"})
    calm = measure_rounding(runner_of(pool, tmp_path, values), 8)
    assert (calm.carried, calm.steps, calm.dtype) == (None, 8, "f32")
    assert 0 < calm.difference < FAR
    assert calm.weight.startswith("model/")
    assert calm.weight.endswith("]")
    assert f"within 8 steps: by {calm.difference:.1e} then" in rounding_line(calm)
    assert rounding_json(calm)["carried"] is None


@pytest.mark.long
def test_a_loss_that_doubles_an_error_thirty_times_shows_it_at_once(
    pool: Pool, tmp_path: Path
) -> None:
    (tmp_path / "chaotic.py").write_text(CHAOTIC)
    values = {
        "task": f"{tmp_path}/chaotic.py:Chaotic",
        "batch": {"samples": 4},
        "optimizer": {"lr": 1e-3},
        "train": {"steps": 30},
        "devices": {"use": "cpu"},
    }
    wild = measure_rounding(runner_of(pool, tmp_path / "wild", values), 8)
    assert wild.carried is not None
    assert wild.carried <= 8
    assert wild.difference > FAR
    assert f"changes the loss by {wild.difference:.1e} at step {wild.carried}" in rounding_line(
        wild
    )


def test_a_run_of_one_step_has_nothing_to_measure(pool: Pool, corpus: Path, tmp_path: Path) -> None:
    values = tiny_values(corpus, train={"steps": 1})
    with pytest.raises(UserError, match="there is none"):
        measure_rounding(runner_of(pool, tmp_path, values), 200)


def test_a_difference_without_an_end_is_null_in_json() -> None:
    rounding = Rounding(
        dtype="f32", weight="a", steps=9, carried=3, difference=float("inf"), seconds=1.0
    )
    assert json.loads(json.dumps(rounding_json(rounding)))["difference"] is None
