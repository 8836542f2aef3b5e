"""A class that names its model's blocks: they are sharded, and run again, one at a time."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from one_curve import check_one_curve
from samecurve import Mean
from samecurve.core.config.sections import Config
from samecurve.errors import UserError
from samecurve.tasks import open_task
from samecurve.torch_engine.model.model_setup import repeated_blocks
from tiny import config_of
from worlds import Pool

WIDTH = 8


class Stage(nn.Module):
    """Most of the model is in the parts of two such stages."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(3)])
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = torch.tanh(part(x))
        return torch.tanh(self.out(x))


class Stages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([Stage(), Stage()])

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return x


class Named:
    """A task that names the stages' parts."""

    def model(self) -> nn.Module:
        return Stages()

    def model_blocks(self, model: Any) -> list[nn.Module]:
        return [part for stage in model.stages for part in stage.parts]

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Mean:
        error = (model(batch["x"]) - batch["x"].flip(1)).square().sum()
        return Mean(error, batch["x"].numel())

    def train_data(self) -> Any:
        return Rows()


class Rows:
    def __len__(self) -> int:
        return 17

    def __getitem__(self, ids: Any) -> dict[str, Any]:
        return {"x": np.random.default_rng(0).normal(size=(17, WIDTH))[ids]}


class Nested(Named):
    def model_blocks(self, model: Any) -> list[nn.Module]:
        return [model.stages[0], model.stages[0].parts[0]]


class Foreign(Named):
    def model_blocks(self, model: Any) -> list[nn.Module]:
        del model
        return [nn.Linear(1, 1)]


def config(kind: type, **train: Any) -> Config:
    return config_of(
        {
            "task": f"{__file__}:{kind.__name__}",
            "batch": {"samples": 5},
            "optimizer": {"lr": 1e-2},
            "train": {"precision": "f64", "steps": 6, **train},
            "devices": {"use": "cpu"},
        }
    )


def test_the_blocks_are_those_that_the_class_names(tmp_path: Path) -> None:
    task = open_task(config(Named), tmp_path)
    model: Any = task.model()
    assert repeated_blocks(model) == Named().model_blocks(model)
    facts = task.facts()
    assert (facts.blocks, facts.block_params) == (6, WIDTH * WIDTH + WIDTH)


@pytest.mark.parametrize(
    ("kind", "cause"), [(Nested, "a Stage and a block inside it"), (Foreign, "no module inside")]
)
def test_blocks_that_can_not_be_blocks_are_refused(kind: type, cause: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=cause) as refused:
        open_task(config(kind), tmp_path).facts()
    assert refused.value.where == "task"


@pytest.mark.long
def test_named_blocks_change_no_curve(pool: Pool, tmp_path: Path) -> None:
    here = config(Named, recompute="block")
    check_one_curve(here, ["fsdp:2"], pool, tmp_path, steps=6, near=1e-12)
