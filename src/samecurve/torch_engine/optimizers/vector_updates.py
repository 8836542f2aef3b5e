"""adamw and sgd that update each number in the same way, wherever an array is cut.

torch's fused kernels for CPUs compute most of an array with vector instructions, and the last few
numbers one by one, which rounds in another way (adamw's second moment differed in about one of a
hundred such numbers). Here they get lengths that vectors fill: the arrays without their ends, and
the ends of all arrays side by side, filled up with zeros.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from samecurve.torch_engine.optimizers.optimizer import BuiltInOptimizer, Group

_VECTOR_BYTES = 64  # of the widest vector instructions


class VectorOptimizer(BuiltInOptimizer):
    def _update(
        self,
        group: Group,
        gradients: list[torch.Tensor],
        lr: float,
        left_out: torch.Tensor | None,
    ) -> None:
        vectors = _in_vectors(group, gradients)
        super()._update(vectors.group, vectors.gradients, lr, left_out)
        vectors.put_ends_back()


@dataclass(frozen=True)
class _Vectors:
    """A group and its gradients in lengths that vectors fill."""

    group: Group
    gradients: list[torch.Tensor]
    # for the weights and each state: the ends in their places, and side by side
    ends: Sequence[tuple[list[torch.Tensor], torch.Tensor]]

    def put_ends_back(self) -> None:
        for in_place, together in self.ends:
            sizes = [len(end) for end in in_place]
            torch._foreach_copy_(in_place, torch.split(together[: sum(sizes)], sizes))


def _in_vectors(group: Group, gradients: list[torch.Tensor]) -> _Vectors:
    numbers = _VECTOR_BYTES // group.views[0].itemsize
    cut = {at for at, view in enumerate(group.views) if view.numel() % numbers}
    if group.views[0].device.type != "cpu" or not cut:
        return _Vectors(group, gradients, ())
    arrays = [group.views, gradients, *group.states]
    bodies: list[list[torch.Tensor]] = []
    ends: list[tuple[list[torch.Tensor], torch.Tensor]] = []
    for of_kind in arrays:
        whole = [array for at, array in enumerate(of_kind) if at not in cut]
        # as they lie in memory; an array may be transposed
        flat = [of_kind[at].as_strided((of_kind[at].numel(),), (1,)) for at in sorted(cut)]
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
    return _Vectors(vectors, cut_gradients, [ends[0], *ends[2:]])
