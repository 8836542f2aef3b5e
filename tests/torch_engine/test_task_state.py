"""Values of a task's attributes, as a checkpoint has them."""

import json
from collections import deque
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from samecurve.errors import UserError
from samecurve.features.task_state.torch_hooks import Hooks
from samecurve.features.task_state.written_values import CantBeWrittenError, read, written
from samecurve.torch_engine.process_group import Comm
from samecurve.torch_engine.users_code import equal


def test_values_come_back_through_json() -> None:
    value = {
        "margin": 0.1,
        "worst": float("inf"),
        3: [1, None, True, "text"],
        "last": deque([(1, 2.5)]),
        "names": {"b", "a", "c"},
        "table": np.arange(6, dtype=np.int32).reshape(2, 3),
        "row": torch.tensor([1.0, -0.0], dtype=torch.bfloat16),
    }
    assert equal(read(json.loads(json.dumps(written(value)))), value)


def test_a_set_has_one_order_in_each_process() -> None:
    assert written({"b", "a", "c"}) == {"set": ["a", "b", "c"]}


@pytest.mark.parametrize("value", [object(), torch.zeros(1 << 17), ["x" * 100_000], len])
def test_what_is_large_or_no_plain_value_is_not_written(value: object) -> None:
    with pytest.raises(CantBeWrittenError):
        written(value)


class Masked(nn.Module):
    """A buffer that no checkpoint has, and one that the first pass registers."""

    scale: torch.Tensor
    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.ones(2))
        self.scale *= 0.5
        return x * self.mask * self.scale


class Keeper:
    """Counts in its class and in a closure; an iterator goes on where it is asked to."""

    seen = 0

    def __init__(self) -> None:
        calls = 0

        def count() -> int:
            nonlocal calls
            calls += 1
            return calls

        self.count, self.places = count, iter(range(9))

    def after_step(self, model: Any, step: int) -> None:
        del model, step
        next(self.places)

    def loss(self) -> int:
        Keeper.seen += 1
        return self.count()


def begun(task: Keeper, model: nn.Module, kept: dict[str, Any]) -> Hooks:
    setup = SimpleNamespace(
        task=task,
        strategy=SimpleNamespace(models=[model]),
        comm=Comm(None),
        device=torch.device("cpu"),
        plan=SimpleNamespace(sees_whole_batch=False),
    )
    hooks = Hooks(cast("Any", setup), None)
    state = SimpleNamespace(updates=[])
    hooks.begin_training(cast("Any", SimpleNamespace(kept=kept, state=state)))
    return hooks


def test_variables_and_unsaved_buffers_come_back() -> None:
    task, model = Keeper(), Masked()
    hooks = begun(task, model, {})
    assert hooks.kept() == {}
    steps = [SimpleNamespace(after_reduction=[])]
    hooks.add_to(cast("Any", steps))
    task.loss()
    model(torch.ones(2))
    steps[0].after_reduction[0]()
    kept = json.loads(json.dumps(hooks.kept()))
    assert kept.keys() == {
        "buffer of model.mask",
        "buffer of model.scale",
        "class variable Keeper.seen",
        "closure variable Keeper.__init__.count.calls",
    }
    assert "mask" not in model.state_dict()
    Keeper.seen = 0
    task, model = Keeper(), Masked()
    hooks = begun(task, model, kept)
    assert (task.loss(), Keeper.seen, float(model.scale)) == (2, 2, 0.5)
    assert torch.equal(model.get_buffer("mask"), torch.ones(2))
    Keeper.seen = 0


def test_an_iterator_that_has_moved_is_refused_by_name() -> None:
    task = Keeper()
    hooks = begun(task, nn.Linear(2, 2), {})
    task.after_step(None, 0)
    with pytest.raises(UserError, match=r"depends on self\.places, .* is an iterator"):
        hooks.kept()
