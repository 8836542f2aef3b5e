"""The gradients of FSDP2's groups of weights, from a backward pass to their sum over the ranks.

Where a step gathers its weights once, its rounds keep whole gradients on each rank, and FSDP2 sums
them in the last round. A group in two bytes keeps them in f32: FSDP2 adds each round's to those
before.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn


class GroupGradients:
    """names: of the weights' shards, by id"""

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self._groups: list[Any] = []  # FSDPParamGroup of torch, which is private
        self.used: set[str] = set()  # parameters that backward gave a gradient in this step
        self._are_summed = True  # in the round in work
        self.ends_step = False  # whether weights that are whole through a step are let go of
        # numbers of the groups whose gradients wait for the last round: the same on all ranks
        self._kept: set[int] = set()

    def watch(self, group: Any) -> Callable[..., None]:
        """Watch one more group. Returns what is to be called in place of its post_backward()."""
        self._groups.append(group)
        return partial(self._sum, len(self._groups) - 1, group.post_backward)

    def begin_step(self) -> None:
        self.used.clear()
        if self._kept:  # the step before was left halfway
            self.drop()

    def begin_round(self, *, is_last: bool, sums: bool) -> None:
        """Before a round of a step that gathers its weights once.

        Weights stay whole through the last backward pass, too: a block that is called twice would
        be gathered again in it, in another order than in the rounds before.

        sums: whether FSDP2 sums gradients over the ranks in this round
        """
        self._are_summed, self.ends_step = sums, is_last
        for group in self._groups:
            group.reduce_grads, group.reshard_after_backward = sums, False

    def are_kept(self, number: int) -> bool:
        return number in self._kept

    def not_summed(self) -> list[int]:
        """In the last round, once all its gradients are summed: the groups that only earlier rounds
        have called.
        """
        return sorted(self._kept) if self._are_summed else []

    def kept_groups(self) -> list[Any]:
        return [self._groups[number] for number in sorted(self._kept)]

    def drop(self) -> None:
        """Let go of all whole gradients."""
        self._kept.clear()
        for param in (param for group in self._groups for param in group.fsdp_params):
            if hasattr(param, "_unsharded_param"):
                param.unsharded_accumulated_grad = param.unsharded_param.grad = None

    def _sum(self, number: int, post_backward: Callable[..., None], *rest: Any) -> None:
        """Let FSDP2 sum or keep a group's gradients. Gradients that no row of this rank gave are
        zero in the sum.
        """
        trained = [param for param in self._groups[number].fsdp_params if is_trained(param)]
        for param in trained:
            whole = param.unsharded_param
            if whole.grad is not None or param.unsharded_accumulated_grad is not None:
                self.used.add(self._names[id(param.sharded_param)])
            elif self._are_summed:
                whole.grad = torch.zeros_like(whole)
        if not self._are_summed:
            self._kept.add(number)
        elif number in self._kept:
            self._kept.discard(number)
            for param in trained:
                if param.unsharded_accumulated_grad is None:  # of this round alone: not widened yet
                    param.to_accumulated_grad_if_needed()
        post_backward(*rest)


def is_trained(param: Any) -> bool:
    """Whether a weight (FSDPParam of torch) has been gathered, and may have a gradient."""
    whole: nn.Parameter | None = getattr(param, "_unsharded_param", None)
    return whole is not None and whole.requires_grad


def trains(group: Any) -> bool:
    """Whether a group has a weight that may have a gradient; frozen blocks have none."""
    return any(map(is_trained, group.fsdp_params))
