"""Features that bring a class of steps."""

from types import SimpleNamespace
from typing import Any

import pytest

from samecurve.errors import UserError
from samecurve.torch_engine.step.step_assembly import make_training_step
from samecurve.torch_engine.step.training_step import TrainingStep


def test_two_features_with_a_step_of_their_own_are_refused() -> None:
    """One of the two would be left out in silence."""
    own = SimpleNamespace(step_class=TrainingStep)
    setup: Any = SimpleNamespace(features={"first": own, "second": own})
    state: Any = SimpleNamespace(updates=[])
    with pytest.raises(UserError, match="first and second each have a step of their own"):
        make_training_step(setup, state)
