"""adamw and sgd that update each number in the same way, wherever an array is cut.

torch's fused kernels for CPUs compute most of an array with vector instructions, and the last few
numbers one by one, which rounds in another way (adamw's second moment differed in about one of a
hundred such numbers). Here they get lengths that vectors fill: the arrays without their ends, and
the ends of all arrays side by side, filled up with zeros.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from samecurve.core.config.sections import Optimizer
from samecurve.torch_engine.optimizers import (
    BuiltInOptimizer,
    Group,
    Kernel,
    OptimizerParam,
)

_VECTOR_BYTES = 64  # of the widest vector instructions


class VectorOptimizer(BuiltInOptimizer):
    def __init__(
        self, fields: Optimizer, trained: Sequence[OptimizerParam], phase: str = ""
    ) -> None:
        super().__init__(fields, trained, phase)
        self._cut = {id(group): _arrays_with_ends(group) for group in self._groups}

    def _kernel(self) -> Kernel:
        return partial(self._update_in_vectors, super()._kernel())

    def _update_in_vectors(
        self,
        update: Kernel,
        group: Group,
        gradients: list[torch.Tensor],
        lr: float,
        left_out: torch.Tensor | None,
    ) -> None:
        cut = self._cut[id(group)]
        if not cut:
            update(group, gradients, lr, left_out)
            return
        vectors, of_vectors, ends = _in_vectors(group, gradients, cut)
        update(vectors, of_vectors, lr, left_out)
        for in_place, together in ends:
            sizes = [len(end) for end in in_place]
            torch._foreach_copy_(in_place, torch.split(together[: sum(sizes)], sizes))


def _arrays_with_ends(group: Group) -> list[int]:
    """The numbers of the arrays that vectors do not fill."""
    if group.views[0].device.type != "cpu":
        return []
    numbers = _VECTOR_BYTES // group.views[0].itemsize
    return [at for at, view in enumerate(group.views) if view.numel() % numbers]


# for the weights, or a state: the ends of arrays in their places, and side by side
Ends = tuple[list[torch.Tensor], torch.Tensor]


def _in_vectors(
    group: Group, gradients: list[torch.Tensor], cut: Sequence[int]
) -> tuple[Group, list[torch.Tensor], list[Ends]]:
    """The group and its gradients in lengths that vectors fill, and the ends of its weights and
    states. cut: the numbers of the arrays that have ends.
    """
    numbers = _VECTOR_BYTES // group.views[0].itemsize
    bodies: list[list[torch.Tensor]] = []
    ends: list[Ends] = []
    for of_kind in [group.views, gradients, *group.states]:
        whole = [array for at, array in enumerate(of_kind) if at not in cut]
        # as they lie in memory; an array may be transposed
        flat = [of_kind[at].as_strided((of_kind[at].numel(),), (1,)) for at in cut]
        cuts = [len(array) // numbers * numbers for array in flat]
        in_place = [array[at:] for array, at in zip(flat, cuts, strict=True)]
        size = sum(map(len, in_place))
        together = torch.cat([*in_place, in_place[0].new_zeros(-size % numbers)])
        whole += [array[:at] for array, at in zip(flat, cuts, strict=True) if at]
        bodies.append([*whole, together])
        ends.append((in_place, together))
    views, cut_gradients, *states = bodies
    num_updates = group.num_updates[:1] * len(views)
    vectors = replace(group, views=views, states=states, num_updates=num_updates)
    return vectors, cut_gradients, [ends[0], *ends[2:]]
