"""How a step's gradients are added up, over the microbatches of a device and over all devices.

A reducer is one class and one entry here. The plan chooses it (core/planning/compute.py).
"""

from collections.abc import Mapping, Sequence
from importlib import import_module

from torch import nn

from samecurve.core.planning.plan import Plan
from samecurve.torch_engine.process_group import Comm
from samecurve.torch_engine.strategies.reducers.base import Reducer

# by name, module:class of what adds up over several processes, and of what does it in one
REDUCERS: Mapping[str, tuple[str, str]] = {
    "tree": ("tree:TreeOverRanks", "tree:Tree"),
    "collective": ("collective:Collective", "base:Reducer"),
}


def make_reducer(plan: Plan, comm: Comm, replicas: Sequence[Sequence[nn.Parameter]]) -> Reducer:
    """The plan's reducer. replicas: by device of this process, the trained parameters."""
    over_ranks, in_process = REDUCERS[plan.compute.reducer]
    module, _, name = (in_process if comm.group is None else over_ranks).partition(":")
    kind: type[Reducer] = getattr(import_module(f"{__package__}.{module}"), name)
    return kind(plan, comm, replicas)
