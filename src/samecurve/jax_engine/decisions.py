"""How a plan says what decides the bits of a run: four decisions, independent of each other.

Where all four are so, a run has the same bits on any devices (train.exact).
"""

from typing import Literal

from samecurve.core.planning.plan import Plan

Reducer = Literal["tree", "collective"]


def reducer_of(plan: Plan) -> Reducer:
    """What adds gradients: `tree` along the tree over the step's microbatches, `collective` in
    the order of XLA's collectives.
    """
    return "tree" if plan.compute.exact else "collective"


def has_fixed_microbatches(plan: Plan) -> bool:
    """Whether microbatches have one size on any devices; else the devices cut the batch."""
    return plan.compute.exact


def has_deterministic_kernels(plan: Plan) -> bool:
    """Whether XLA may only take kernels that give the same bits each time."""
    return plan.compute.exact


def has_fixed_threads(plan: Plan) -> bool:
    """Whether a process computes with one number of threads, whatever its number of CPU devices."""
    return plan.compute.exact
