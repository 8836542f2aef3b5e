"""Whether a task's own code stands in the way of the same bits, tried where the plan may choose it.

What a run with the same bits on any devices would refuse in its first step is found when the task
is described, by a backward pass of two samples: so no run is refused for bits that nobody asked
for. Large models are tried without values, which does not show operations without a deterministic
form.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch

from samecurve.core.config.sections import Config
from samecurve.core.protocols import START
from samecurve.errors import UserError
from samecurve.tasks.adapter import TaskAdapter
from samecurve.tasks.adapter.sample_work import MOST_OPERATIONS, emptied, total_of, without_values
from samecurve.tasks.adapter.two_samples import can_be_tried, is_tried, kept, two_rows
from samecurve.torch_engine.model.counted_work import WorkCounter
from samecurve.torch_engine.model.model_setup import freeze
from samecurve.torch_engine.precision import refuse_nondeterministic
from samecurve.torch_engine.randomness.replaced_functions import keyed_trial
from samecurve.torch_engine.strategies.reducers.buckets import note_gradient


def bits_hindrance(adapter: TaskAdapter, config: Config, params: int) -> str:
    """What a run with the same bits would refuse in its first step; '': nothing, or not tried.

    params: the model's numbers
    """
    if not config.train.plan_chooses_bits or adapter.phases or not can_be_tried(adapter):
        return ""
    rows = two_rows(adapter)
    try:
        if is_tried(adapter, params):
            with kept(adapter, config.train.seed), _deterministic(), torch.enable_grad():
                _try_backward(adapter, config, rows)
        else:
            with (
                without_values(adapter, config.train.seed) as mode,
                torch.enable_grad(),
                WorkCounter(MOST_OPERATIONS),
            ):
                _try_backward(adapter, config, emptied(mode, rows))
    except UserError as refusal:
        return refusal.reason
    except Exception as error:
        # an operation without a deterministic form; any other failure is the run's to tell
        first_line = str(error).strip().partition("\n")[0]
        return f"{first_line:.120}" if "deterministic" in first_line else ""
    return ""


def _try_backward(adapter: TaskAdapter, config: Config, rows: Mapping[str, torch.Tensor]) -> None:
    """UserError: gradients that can't be added along a tree."""
    model = adapter.model()
    freeze(model, config.optimizer.rules)
    fired: set[int] = set()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(
                partial(note_gradient, fired, in_tree=True)
            )
    method = "features" if adapter.whole_batch else "loss"
    with keyed_trial(2):
        returned = getattr(adapter.task, method)(model, rows, **adapter.arguments_of(method, START))
        total_of(adapter, returned).backward()  # type: ignore[no-untyped-call]


@contextmanager
def _deterministic() -> Iterator[None]:
    """Let operations without a deterministic form fail for a while."""
    before = torch.are_deterministic_algorithms_enabled()
    refuse_nondeterministic(True)
    try:
        yield
    finally:
        refuse_nondeterministic(before)
