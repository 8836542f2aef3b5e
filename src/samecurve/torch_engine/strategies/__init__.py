"""The strategies of this engine by name.

A strategy is one class, one row in core/strategies.py, one entry here, and a layout in
tests/test_promise.py.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module

import torch

from samecurve.core.planning.plan import Plan
from samecurve.torch_engine.process_group import Comm
from samecurve.torch_engine.strategies.base import Strategy

# name -> module:class, imported when it is used
STRATEGIES: Mapping[str, str] = {
    "single": "base:Strategy",  # the base of all, as it is
    "dp": "replicated:Replicated",
    "ddp": "replicated:Replicated",
    "fsdp": "sharded.strategy:Sharded",
    "hsdp": "sharded.strategy:Sharded",
}
# what stands in the place of another one where sums follow the step's tree
_WITH_TREE = {"base:Strategy": "replicated:Replicated"}


def make_strategy(plan: Plan, comm: Comm, devices: Sequence[torch.device]) -> Strategy:
    """The plan's strategy, for these devices of this process."""
    place = STRATEGIES[plan.layout.strategy]
    if plan.compute.reducer == "tree":
        place = _WITH_TREE.get(place, place)
    module, _, name = place.partition(":")
    kind: type[Strategy] = getattr(import_module(f"{__package__}.{module}"), name)
    return kind(plan, comm, devices)
