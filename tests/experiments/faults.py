"""Faults to plant in a rank: each a rehearsal that is right but for one thing."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from samecurve.core.determinism import Mean
from samecurve.core.protocols import Arrays
from samecurve.run.directory import Run
from samecurve.torch_engine.engine import TorchEngine
from samecurve.torch_engine.strategies.reducers import make_reducer
from samecurve.torch_engine.strategies.replicated import Replicated
from samecurve.torch_engine.strategies.sharded.group import Gradients, WeightGroup
from samecurve.worker.jobs.train_job import rehearse
from samecurve_products.text.language.torch_task import TorchLanguage

LOST = "layers.1.mlp.up_proj.weight"


def mean_of_means(index: int, group: Any, argument: str) -> None:
    """Each microbatch's mean counts the same, however many tokens it has; the split check, which
    would refuse it, does not look.
    """
    right = TorchLanguage.loss

    def loss(task: TorchLanguage, model: Any, batch: Arrays) -> Mean:
        mean = right(task, model, batch)
        return Mean(mean.sum / mean.weight, 1)

    with (
        patch.object(TorchLanguage, "loss", loss),
        patch.object(TorchEngine, "begin_training", lambda *_rows, **_options: None),
    ):
        rehearse(index, group, argument)


def another_seed(index: int, group: Any, argument: str) -> None:
    """The second rank draws its samples by another seed."""
    right = Run.read_plan

    def read_plan(run: Run) -> Any:
        plan = right(run)
        return replace(plan, fixed=replace(plan.fixed, seed=plan.fixed.seed + index))

    with patch.object(Run, "read_plan", read_plan):
        rehearse(index, group, argument)


def one_not_reduced(index: int, group: Any, argument: str) -> None:
    """The reducer leaves one parameter's gradient as each rank has it; the guard does not look."""
    right = Replicated.distribute

    def distribute(strategy: Replicated, models: list[nn.Module], materialize: Any) -> None:
        right(strategy, models, materialize)
        strategy._reducer.close()
        named = models[0].named_parameters()
        rest = [parameter for name, parameter in named if name != LOST]
        strategy._reducer = make_reducer(strategy._plan, strategy._comm, [rest])

    with (
        patch.object(Replicated, "distribute", distribute),
        patch.object(TorchEngine, "begin_training", lambda *_rows, **_options: None),
    ):
        rehearse(index, group, argument)


def blocks_averaged(index: int, group: Any, argument: str) -> None:
    """Gradients of blocks are averaged over the ranks, and those outside of blocks are summed; the
    split check, which would refuse it, does not look.
    """
    right = WeightGroup.packed

    def packed(weights: WeightGroup, gradients: Gradients) -> torch.Tensor:
        sent = right(weights, gradients)
        return sent if weights.is_root else sent / len(sent)

    with (
        patch.object(WeightGroup, "packed", packed),
        patch.object(TorchEngine, "begin_training", lambda *_rows, **_options: None),
    ):
        rehearse(index, group, argument)


def dies(index: int, group: Any, argument: str) -> None:
    """The second rank ends without a word."""
    if index == 1:
        import os

        os._exit(3)
    rehearse(index, group, argument)
