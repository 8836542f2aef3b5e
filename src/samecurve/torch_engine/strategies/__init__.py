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
# those that are others where sums follow the step's tree
_WITH_TREE: Mapping[str, str] = {
    "single": "replicated:Replicated",
    "fsdp": "exact_fsdp:ExactFSDP",
    "hsdp": "exact_fsdp:ExactFSDP",
}
_WITH_TREE_ONCE = "exact_fsdp_once:ExactFSDPOnce"  # where weights are gathered once a step
_OWN_SHARDED = "sharded.strategy:Sharded"  # in place of both where SAMECURVE_SHARDED is own


def make_strategy(
    plan: Plan, comm: Comm, devices: Sequence[torch.device], *, own_sharded: bool = False
) -> Strategy:
    """The plan's strategy, for these devices of this process.

    own_sharded: shard by strategies/sharded, not by torch's FSDP2
    """
    place = STRATEGIES[plan.layout.strategy]
    if plan.compute.reducer == "tree":
        place = _WITH_TREE.get(plan.layout.strategy, place)
        if plan.layout.gathers_once:
            place = _WITH_TREE_ONCE
    if own_sharded and plan.layout.shards > 1:
        place = _OWN_SHARDED
    module, _, name = place.partition(":")
    kind: type[Strategy] = getattr(import_module(f"{__package__}.{module}"), name)
    return kind(plan, comm, devices)
