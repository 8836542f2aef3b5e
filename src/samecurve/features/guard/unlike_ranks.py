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
    """The error of a loss, of a mean beside it or of a gradient that ranks have computed of the same
    samples, and that is not the same on all. All ranks call it together.
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
            what = "the loss" if name in {"loss", _GRADIENT} else f'"{name}", logged beside it,'
            shown = "another gradient than on rank 0" if name == _GRADIENT else _shown(one, two)
            ids = ", ".join(map(str, samples))
            return unlike_error(setup, f"{what} of samples {ids} is on rank {rank} {shown}")
    return None


def _agree(name: str, one: Sequence[float], two: Sequence[float], number_format: Format) -> bool:
    if name != _GRADIENT:
        pairs = zip(one, two, strict=True)
        return all(relative_difference([a], [b]) <= TOLERANCE[number_format] for a, b in pairs)
    largest = math.sqrt(max(one[0], two[0]))
    off = math.dist(one[1:], two[1:]) / math.sqrt(len(one) - 1)
    return not math.isfinite(largest) or off <= GRADIENTS[number_format] * largest


def _shown(one: Sequence[float] | None, two: Sequence[float] | None) -> str:
    values = [
        each and number_text(each[0] / each[1] if each[1] else each[0]) for each in (two, one)
    ]
    here, there = (value or "absent" for value in values)
    return f"{here}, and {there} on rank 0" if here != there else "another one than on rank 0"


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
