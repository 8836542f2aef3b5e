"""What blocks, autograd and code that reads weights ask for in a forward and a backward pass."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from samecurve.torch_engine.model.saved_weights import unchanged, with_version
from samecurve.torch_engine.strategies import GatherOrderError
from samecurve.torch_engine.strategies.sharded.gathers import (
    Gathers,
    another_read,
    replaced,
)
from samecurve.torch_engine.strategies.sharded.group import WeightGroup
from samecurve.torch_engine.strategies.sharded.link import ShardLink
from samecurve.torch_engine.strategies.sharded.weight import Weight

_PLAIN = {torch.Tensor, nn.Parameter}


class _Kept(NamedTuple):
    """A weight, or a view of one, that autograd keeps for backward."""

    group: WeightGroup
    tensor: torch.Tensor


def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, out of the compiler's reach where the compiler is at work: it would compile
    what is called between two parts of a block.
    """
    if "torch._dynamo" not in sys.modules:
        return function
    disable: Any = torch.compiler.disable
    uncompiled: Callable[..., Any] = disable(function)
    return uncompiled


class WeightReads:
    """Gathers the weights of a model when they are read."""

    def __init__(self, link: ShardLink, note_gradient: Callable[[nn.Parameter], None]) -> None:
        """note_gradient: is called with each whole weight that has got a gradient"""
        self._link, self._note_gradient = link, note_gradient
        self._order: Gathers | None = None  # until the model is cut
        self._handles: list[Any] = []

    def follow(
        self,
        order: Gathers,
        groups: Sequence[WeightGroup],
        blocks: Sequence[tuple[nn.Module, Sequence[WeightGroup]]],
    ) -> None:
        """Ask this order from now on, before and after each call of a block."""
        self._order = order
        before_call, after_call = _uncompiled(self._before_call), _uncompiled(self._after_call)
        for block, of_block in blocks:
            before = partial(before_call, of_block)
            after = partial(after_call, of_block)
            self._handles.append(block.register_forward_pre_hook(before, prepend=True))
            self._handles.append(block.register_forward_hook(after))
        for group in groups:
            for weight in group.trained:
                hook: Any = partial(self._gradient_came, group, weight)
                register: Any = weight.whole.register_post_accumulate_grad_hook
                self._handles.append(register(hook))

    def close(self) -> None:
        """Let go of the model, which torch's part in C++ would keep."""
        for handle in self._handles:
            handle.remove()

    def read(self, group: WeightGroup, weight: Weight) -> torch.Tensor | None:
        """The whole weight, for code that reads it while it is not in its module.

        In a forward pass the group stays whole until the pass ends: nobody knows what was made of
        the weight. In backward a block runs again.
        """
        order = self._order
        if order is None or not order.is_at_work:
            return None
        if not order.is_backward:
            group.is_held = True
        try:
            self._need(group)
        except GatherOrderError as error:
            raise another_read(weight.name) from error
        if order.is_backward:
            group.swap_in()
        return weight.whole

    def saved_weights(self) -> saved_tensors_hooks:
        """Hooks by which autograd keeps a weight's place, not its memory, in a forward pass."""
        return saved_tensors_hooks(_uncompiled(self._pack), self._unpack)

    def without_views(self, result: Any, groups: Sequence[WeightGroup] = ()) -> Any:
        """A result with copies in place of weights and views of them, whose memory goes.

        groups: whose weights these are; none: any
        """

        def own(tensor: torch.Tensor) -> torch.Tensor:
            group = self._group_at(tensor)
            is_view = group is not None and (not groups or group in groups)
            return tensor.clone() if is_view else tensor

        return tree_map_only(torch.Tensor, own, result)

    def _need(self, group: WeightGroup) -> None:
        if group.is_whole:
            return
        assert self._order is not None
        if torch._C._len_torch_dispatch_stack():  # noqa: SLF001 - public nowhere
            # a checkpoint that keeps some results numbers a block's operations
            with _disable_current_modes():
                self._order.need(group)
        else:
            self._order.need(group)

    def _before_call(self, groups: Sequence[WeightGroup], _module: nn.Module, _args: Any) -> None:
        order = self._order
        if order is None or not order.is_at_work:
            return
        for group in groups:
            if name := group.replaced():
                raise replaced(name)
            self._need(group)
            group.swap_in()

    def _after_call(
        self, groups: Sequence[WeightGroup], _module: nn.Module, _args: Any, output: Any
    ) -> Any:
        """Give the weights back, and return the output without views of them."""
        order = self._order
        if order is None or not order.is_at_work or order.is_backward:
            return output
        output = self.without_views(output, groups)
        if order.trains and torch.is_grad_enabled():
            self._watch_backward(groups, output)
        for group in groups:
            group.swap_out()
            if not order.stays_after_call(group):
                group.free()
        return output

    def _watch_backward(self, groups: Sequence[WeightGroup], output: Any) -> None:
        """Have the weights gathered when backward comes to the first result of a block."""
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(partial(self._before_backward, groups))  # type: ignore[no-untyped-call]
                return

    def _before_backward(self, groups: Sequence[WeightGroup], _gradient: torch.Tensor) -> None:
        order = self._order
        if order is None or not order.is_backward:
            return  # a gradient that is taken within the forward pass
        with _disable_current_modes():
            for group in groups:
                order.need_in_backward(group)
                group.swap_in()

    def _gradient_came(self, group: WeightGroup, weight: Weight, whole: nn.Parameter) -> None:
        assert self._order is not None
        self._note_gradient(whole)
        group.with_gradient.add(weight.name)
        self._order.gradient_came(group)

    def _pack(self, tensor: torch.Tensor) -> Any:
        group = self._group_at(tensor)
        return with_version(tensor) if group is None else _Kept(group, tensor.detach())

    def _unpack(self, kept: Any) -> torch.Tensor:
        if type(kept) is not _Kept:
            return unchanged(kept)
        self._need(kept.group)
        return kept.tensor

    def _group_at(self, tensor: torch.Tensor) -> WeightGroup | None:
        """The group in whose memory a tensor lies; None: in no group's."""
        if type(tensor) not in _PLAIN or tensor.layout != torch.strided:
            return None
        group = self._link.gathered.get(tensor.untyped_storage().data_ptr())
        return group if isinstance(group, WeightGroup) else None
