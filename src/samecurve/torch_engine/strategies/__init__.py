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

# name -> module:class, imported when it is used: torch's FSDP takes a second or two
STRATEGIES: Mapping[str, str] = {
    "single": "base:Strategy",  # the base of all, as it is
    "dp": "replicated:Replicated",
    "ddp": "replicated:Replicated",
    "fsdp": "fsdp:FSDP",
    "hsdp": "fsdp:FSDP",
}
# where sums follow the step's tree: whole models, and sharded ones
_TREE = "replicated:Replicated"
_TREE_SHARDED = "exact_fsdp:ExactFSDP"
_TREE_ONCE = "exact_fsdp_once:ExactFSDPOnce"  # which gather weights once a step


def make_strategy(plan: Plan, comm: Comm, devices: Sequence[torch.device]) -> Strategy:
    """The plan's strategy, for these devices of this process."""
    place = STRATEGIES[plan.layout.strategy]
    if plan.compute.reducer == "tree":
        place = _TREE_SHARDED if plan.layout.shards > 1 else _TREE
        if plan.layout.gathers_once:
            place = _TREE_ONCE
    module, _, name = place.partition(":")
    kind: type[Strategy] = getattr(import_module(f"{__package__}.{module}"), name)
    return kind(plan, comm, devices)
