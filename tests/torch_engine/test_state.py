"""What is not finite is not saved."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from samecurve.errors import RunError
from samecurve.torch_engine.checkpoint import gather
from samecurve.torch_engine.model.model_setup import freeze
from samecurve.torch_engine.optimizers import BuiltInOptimizer, optimizer_params
from samecurve.torch_engine.process_group import Comm
from samecurve.torch_engine.step import State
from samecurve.torch_engine.strategies import Strategy
from tiny import config_of, tiny_values

CPU = torch.device("cpu")


def state(tmp_path: Any) -> State:
    model = torch.nn.Linear(3, 2)
    fields = config_of(tiny_values(tmp_path)).optimizer
    freeze(model, fields.rules)
    trained = optimizer_params(model)
    return State(model, trained, BuiltInOptimizer(fields, trained))


def saved(found: State) -> list[str]:
    comm, nothing_asked = Comm(), cast("Any", None)
    strategy = Strategy(nothing_asked, comm, [CPU])
    alone: Any = SimpleNamespace(strategy=strategy, comm=comm, device=CPU)
    return [piece.name for piece in gather(alone, found)]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_named_and_nothing_is_saved(
    value: float, tmp_path: Any
) -> None:
    found = state(tmp_path)
    assert "model/weight" in saved(found)
    found.optimizer.state_of(found.trained[1])["exp_avg"][1] = value
    with pytest.raises(RunError, match=r"not finite any more are optimizer/exp_avg/bias"):
        saved(found)
