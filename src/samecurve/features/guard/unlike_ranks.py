"""A loss that is another one on another rank: it is found by its numbers, and told in words."""

import json
import math
from collections.abc import Sequence

import torch

from samecurve.errors import UserError
from samecurve.features.guard.additivity import (
    GRADIENTS,
    TOLERANCE,
    Format,
    number_text,
    relative_difference,
)
from samecurve.features.guard.trials import Tried
from samecurve.torch_engine.process_group import texts_of_all
from samecurve.torch_engine.step.setup import EngineSetup
from samecurve.torch_engine.users_code.code_places import place_of_method

_GRADIENT = "its gradient"


def error_between_ranks(
    setup: EngineSetup, tried: Tried, samples: Sequence[int], number_format: Format
) -> UserError | None:
    """The error of a loss, of a mean beside it or of a gradient: all ranks have computed it of the
    same samples, and one has got another. All ranks call it together.
    """
    if setup.comm.world_size == 1:
        return None
    numbers = {name: [trial.sum, trial.weight] for name, trial in tried.losses.items()}
    if tried.gradients and setup.plan.layout.shards == 1:
        total = torch.stack([one.cpu() for one in tried.gradients.values()]).sum(0)
        numbers[_GRADIENT] = total.tolist()
    texts = texts_of_all(setup.comm, json.dumps(numbers).encode(), setup.device)
    first, *others = (json.loads(text) for text in texts)
    for rank, other in enumerate(others, 1):
        for name in first.keys() | other.keys():
            one, two = first.get(name), other.get(name)
            if one and two and _agree(name, one, two, number_format):
                continue
            ids = ", ".join(map(str, samples))
            return unlike_error(setup, _cause(name, f"samples {ids}", rank, one, two))
    return None


def _agree(name: str, one: Sequence[float], two: Sequence[float], number_format: Format) -> bool:
    if name != _GRADIENT:
        pairs = zip(one, two, strict=True)
        return all(relative_difference([a], [b]) <= TOLERANCE[number_format] for a, b in pairs)
    largest = math.sqrt(max(one[0], two[0]))
    off = math.dist(one[1:], two[1:]) / math.sqrt(len(one) - 1)
    return not math.isfinite(largest) or off <= GRADIENTS[number_format] * largest


def _cause(
    name: str,
    samples: str,
    rank: int,
    one: Sequence[float] | None,
    two: Sequence[float] | None,
) -> str:
    """In words. one, two: what ranks 0 and `rank` have got; None: nothing of that name"""
    if name == _GRADIENT:
        return f"{samples} give another gradient on rank {rank} than on rank 0"
    what = "the loss" if name == "loss" else f'"{name}", logged beside the loss,'
    first, other = (
        number_text(each[0] / (each[1] or 1)) if each else "absent" for each in (one, two)
    )
    if first == other:
        return f"{what} of {samples} is another one on rank {rank} than on rank 0"
    return f"{what} of {samples} is {first} on rank 0, and {other} on rank {rank}"


def unlike_error(setup: EngineSetup, cause: str) -> UserError:
    """The error of such a loss; all ranks call it together."""
    method = "features" if setup.plan.sees_whole_batch else "loss"
    where, state = place_of_method(setup.task, method), setup.features.get("task_state")
    differing = state.differing() if state else {}
    if differing:
        from samecurve.features.task_state.torch_hooks import KEEP_IN_MODEL

        name, values = next(iter(differing.items()))
        shown = name.replace("task.", "self.", 1)
        return UserError(f"{cause}: {shown} {values}", KEEP_IN_MODEL, where)
    return UserError(
        cause,
        "the loss may depend on the weights, the sample and the step alone. Look for what it reads"
        " beside them: the rank, a clock, a file, a global, a closure, a cache, and what an earlier"
        " microbatch has left in them. If there is none, a device may compute wrong:"
        " --set train.sentinel=50 finds it (docs/sentinel.md)",
        where,
    )
