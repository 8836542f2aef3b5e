"""Values of a task's attributes, as a checkpoint has them."""

import json
from collections import deque

import numpy as np
import pytest
import torch

from samecurve.features.task_state.written_values import CantBeWrittenError, read, written
from samecurve.torch_engine.users_code.side_effects import equal


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
