"""The order in which fsdp gathers blocks: all ranks must gather the same blocks in the same order.

Suppose that a rank leaves a block out, because none of its rows needs the block. It would gather
the weights of another block than its peers: the ranks would wait for each other, or would take the
weights of one block for those of another. So all ranks compare each event of the first forward and
backward pass, and each later pass is compared with the first one before anything is gathered.

A single parameter of a block may be left out by some ranks: its gradient is zero there.
"""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from samecurve.errors import UserError
from samecurve.torch_engine.process_group import Comm

_END = -1  # the event that ends a forward pass; group n's gathering is 2n, its reduction 2n + 1


class GatherOrder:
    """Watches the order in which fsdp gathers weights and reduces gradients.

    root: the module that fully_shard() was called on last, with its blocks inside
    names: the names of its parameters, by id
    """

    def __init__(
        self, root: nn.Module, names: dict[int, str], comm: Comm, device: torch.device
    ) -> None:
        self._names, self._comm, self._device = names, comm, device
        self.used: set[str] = set()  # parameters that backward gave a gradient
        self._orders: dict[Hashable, list[int]] = {}  # of the first pass, by the call
        self._order: list[int] = []  # that the present pass has to follow
        self._at, self._learns, self._watches = 0, False, False
        self._summed: set[int] = set()  # groups whose gradients the present pass has summed
        self._has_left = False  # whether the last pass had no backward
        self._titles: list[str] = []
        self._groups: list[Any] = []
        watched: set[int] = set()
        for name, module in root.named_modules():
            for group in _groups_of(module):
                if id(group) not in watched:  # several modules may share a group
                    watched.add(id(group))
                    self._watch(group, name.removeprefix("model").removeprefix(".") or "the model")

    def _watch(self, group: Any, title: str) -> None:
        """Watch a group of weights. Any: FSDP2's FSDPParamGroup is public nowhere."""
        number = len(self._titles)
        self._titles.append(title)
        self._groups.append(group)
        unshard, post_backward = group.unshard, group.post_backward
        group.unshard = partial(self._unshard, group, number, unshard)
        group.post_backward = partial(self._post_backward, group, number, post_backward)

    def begin(self, function: Callable[..., object], *arguments: object) -> None:
        """Begin the forward pass of this function, which a backward pass will follow.

        If the pass before had no backward pass (an evaluation, features), the weights that it left
        gathered are freed, and its order, by which backward gathers ahead, is forgotten.
        """
        if self._has_left:
            self._reshard()
        words = [argument for argument in arguments if isinstance(argument, str)]
        key = (getattr(function, "__qualname__", ""), torch.is_grad_enabled(), *words)
        self._learns = key not in self._orders
        self._order = self._orders.setdefault(key, [])
        self._at, self._watches, self._has_left = 0, True, False
        self._summed.clear()

    def _reshard(self) -> None:
        for group in self._groups:
            group.reshard()
            group._post_forward_indices.clear()  # noqa: SLF001 - public nowhere
            getattr(group.comm_ctx, "post_forward_order", []).clear()  # made in a first pass

    def reset(self) -> None:
        """Go back to before the first pass: nothing is gathered, and no order is known."""
        self._reshard()
        self._orders.clear()
        self.used.clear()
        self._watches = self._has_left = False

    def leave(self) -> None:
        """Begin a call without a backward pass, in which all ranks do the same."""
        self._watches, self._has_left = False, True

    def end_forward(self) -> None:
        self._note(_END)

    def _unshard(self, group: Any, number: int, unshard: Callable[..., None], *rest: Any) -> None:
        if not group.is_unsharded and group._all_gather_result is None:  # noqa: SLF001
            self._note(2 * number)
        unshard(*rest)

    def _post_backward(
        self, group: Any, number: int, post_backward: Callable[..., None], *rest: Any
    ) -> None:
        """Reduce the gradients of a group. A gradient that this rank's rows did not give is zero:
        other ranks may have it.

        torch before 2.13 ends a pass with one call for each module of a group; all calls but the
        first have nothing to sum.
        """
        is_idle = group._training_state == TrainingState.IDLE  # noqa: SLF001
        if is_idle and number in self._summed:
            post_backward(*rest)
            return
        self._summed.add(number)
        self._note(2 * number + 1)
        for param in group.fsdp_params:
            self._fill(param)
        post_backward(*rest)

    def _fill(self, param: Any) -> None:
        whole: nn.Parameter | None = getattr(param, "_unsharded_param", None)
        if whole is None or not whole.requires_grad:
            return
        if whole.grad is not None or param.unsharded_accumulated_grad is not None:
            self.used.add(self._names[id(param.sharded_param)])
        else:
            whole.grad = torch.zeros_like(whole)

    def _note(self, event: int) -> None:
        """Note an event.

        UserError: the first pass, or another rank, has another event at this place.
        """
        if not self._watches:
            return
        if self._learns:
            table = torch.zeros(self._comm.world_size, dtype=torch.float64, device=self._device)
            table[self._comm.rank] = event
            events = {int(one) for one in self._comm.all_reduce(table)().tolist()}
            self._order.append(event)
        else:
            expected = self._order[self._at] if self._at < len(self._order) else _END
            events = {event, expected}
        self._at += 1
        if len(events) > 1:
            titles = sorted({self._titles[one // 2] for one in events if one != _END})
            raise UserError(
                f"fsdp: {' or '.join(titles)} is called by some ranks and not by others, or not in"
                " every step, and its weights are gathered by all ranks together",
                "call it in every forward pass, with no rows where none needs it; put it in a block"
                " that is always called; or --strategy ddp",
                "model",
            )


def _groups_of(module: nn.Module) -> list[Any]:
    """The groups of weights that fully_shard() made of a module; torch before 2.13 made one."""
    state: Any = getattr(module, "_get_fsdp_state", None)
    if state is None:
        return []
    fsdp_state = state()
    groups: list[Any] | None = getattr(fsdp_state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [fsdp_state._fsdp_param_group]  # noqa: SLF001 - as above
    return [group for group in groups if group is not None]
