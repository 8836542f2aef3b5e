"""The order in which fsdp gathers blocks and sums their gradients, the same on all ranks.

All ranks must gather the same block at the same time: else they would wait for each other, or take
one block's weights for another's. A rank may call fewer blocks than its peers, because none of its
rows needs them (experts) or because they are skipped at random (LayerDrop). It then takes part in
what the others do: it gathers the block without using it, and adds zeros to its gradient.

The first forward and backward pass is made in lockstep. It finds the order in which each later pass
gathers (events 2n: the weights of group n) and sums (2n + 1: the gradients of group n). A block
that every rank skipped is given its place in the order by its number, if the model calls its blocks
by their numbers; if not, the next pass is made in lockstep, too.

A block may be called several times in one pass. Where the number of its calls varies (a model that
works through its rows in chunks), ranks ask each other at the end of the forward pass whether one
of them has more calls to make; if so, the rest of the pass is made in lockstep, too.

Where a step gathers its weights once, each of its rounds follows the same order, though only the
first round gathers and only the last one sums (group_gradients.py).
"""

from collections import Counter
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch import nn

from samecurve.errors import UserError
from samecurve.torch_engine.process_group import Comm
from samecurve.torch_engine.strategies.fsdp_groups import (
    begin_anew,
    forget_pass,
    gather_for_backward,
    groups_of,
    is_idle,
    keep_frozen,
    needing_gradient,
    post_forward,
    reshard,
    states_of,
    uncounted,
)
from samecurve.torch_engine.strategies.gather_events import (
    END,
    CallCounts,
    ListOwners,
    add_skipped_blocks,
    is_sum,
    num_repeats,
    skipped_blocks,
)
from samecurve.torch_engine.strategies.group_gradients import GroupGradients


class GatherOrder:
    """root: the module that fully_shard() was called on last, with its blocks within.

    names: of its parameters, by id
    """

    def __init__(
        self, root: nn.Module, names: dict[int, str], comm: Comm, device: torch.device
    ) -> None:
        self._root, self._comm, self._device = root, comm, device
        self.gradients = GroupGradients(names)
        self._orders: dict[Hashable, list[int]] = {}  # of a first pass, by what was called
        # of the pass in work: whether it has gradients and a backward pass, what was called
        self._key: tuple[Hashable, ...] = ()
        self._order: list[int] = []  # that the pass in work follows
        self._at = 0  # the place of the next event in the order
        self._learns = self._watches = self._in_forward = False
        self._has_diverged = False  # whether ranks went different ways in the pass that is learnt
        self._skips = False  # whether some rank has skipped a block that others called, or all did
        self._counts = CallCounts()
        self._calls: Counter[int] = Counter()  # of groups by their ids, in the forward pass
        self._takes_part = False  # in what other ranks do, with a block that this rank skips
        self._prefetches = False
        self._awaited: set[int] = set()  # groups whose gradients this rank has yet to compute
        self._called: list[int] = []  # groups that any rank calls in this pass, the last first
        self._summed: set[int] = set()  # groups whose gradients the pass in work has summed
        self._has_left = False  # whether a pass without backward came last
        self._left: set[int] = set()  # groups that it has left gathered, and this one has not used
        # whether the pass in work has taken a gradient within its forward pass (a penalty)
        self._has_inner_backward = False
        self._sums_all = False  # at the end of a backward pass: the gradients not summed yet
        self._titles: list[str] = []
        self._states: list[Any] = []  # FSDPState of torch, by module
        self._groups: list[Any] = []  # FSDPParamGroup of torch, which is private
        self._sums: list[Callable[[], None]] = []  # by group: sums its gradients over the ranks
        self._of_root = groups_of(root)
        watched: set[int] = set()
        for name, module in root.named_modules():
            for state in states_of(module):
                self._states.append(state)
                end = state._root_post_backward_final_callback  # noqa: SLF001 - public nowhere
                callback = partial(self._end_backward, end)
                state._root_post_backward_final_callback = callback  # noqa: SLF001
                # of a module in a block, too, when the block runs again in backward
                state._root_pre_forward = uncounted(state._root_pre_forward)  # noqa: SLF001
            for group in groups_of(module):
                if id(group) not in watched:  # several modules may share one
                    watched.add(id(group))
                    self._watch(group, name.removeprefix("model").removeprefix(".") or "the model")
        self._owners = ListOwners(root.get_submodule("model"), self._titles)

    def _watch(self, group: Any, title: str) -> None:
        number = len(self._titles)
        self._titles.append(title)
        self._groups.append(group)
        self._sums.append(self.gradients.watch(group))
        group.unshard = partial(self._unshard, group, number, group.unshard)
        group.post_backward = partial(self._post_backward, group, number, group.post_backward)
        group.pre_forward = partial(self._pre_forward, group, group.pre_forward)
        group.post_forward = partial(post_forward, group, group.post_forward)
        for name in ("unshard", "wait_for_unshard", "post_backward", "pre_forward", "post_forward"):
            setattr(group, name, uncounted(getattr(group, name)))
        group._backward_prefetch = partial(self._prefetch, group._backward_prefetch)  # noqa: SLF001

    def begin(
        self, function: Callable[..., object], *arguments: object, backward_follows: bool
    ) -> None:
        """Before a forward pass of this function.

        What a pass without backward (an evaluation, features) has left gathered is gathered anew
        for one with backward, and its order, by which backward gathers ahead, is forgotten.
        """
        self.finish()
        if self._has_left and backward_follows:
            reshard(self._groups)
        words = [argument for argument in arguments if isinstance(argument, str)]
        kind = (torch.is_grad_enabled(), backward_follows)
        self._key = (kind, getattr(function, "__qualname__", ""), *words)
        self._order = self._orders.setdefault(self._key, [])
        self._learns, self._has_diverged = not self._order, False
        self._at, self._watches, self._in_forward = 0, True, True
        if self._learns:
            self._owners.watch()
        self._has_left = not backward_follows
        self._has_inner_backward = False
        self._left = {number for number, one in enumerate(self._groups) if one.is_unsharded}
        self._summed.clear()
        self._awaited.clear()
        self._calls.clear()

    def end_forward(self) -> None:
        """Before backward. After a gradient within the forward pass all weights are gathered until
        backward ends, which may need any of them at any time to differentiate that gradient.
        """
        if self._has_inner_backward:
            for group in self._groups:
                gather_for_backward(group)
        self._reach(END)
        self._in_forward = False
        forward = self._order[: self._order.index(END)]
        self._called = list(dict.fromkeys(event // 2 for event in reversed(forward)))

    def finish(self) -> None:
        """After backward: take part in what other ranks have yet to do."""
        if not self._watches:
            return
        if self._in_forward or self._awaited:  # an error, or a pass without backward
            if self._learns:
                self._order.clear()
        else:
            last = self._at
            self._reach(END)
            late = self.gradients.not_summed()
            for number in late:
                self._sums[number]()
            if late or self._at > last + 1:
                for group in self._groups:
                    group.finalize_backward()  # waits for the sums
            if self._learns:
                self._end_learning()
        if self.gradients.ends_step:
            reshard(self._groups)
        self._watches = False

    def _end_learning(self) -> None:
        """Keep the order of a pass without skipped blocks. In a model that skips some, gradients
        are summed elsewhere from now on (see _pre_forward), so one more pass is learnt from.
        """
        self._compare_counts()
        skipped = self._skipped_blocks()
        is_new = (skipped or self._has_diverged) and not self._skips
        if is_new or not add_skipped_blocks(self._order, skipped):
            self._skips = True
            self._order.clear()

    def _skipped_blocks(self) -> list[list[int]]:
        """The blocks that every rank skipped in the pass that was learnt."""
        called = {event // 2 for event in self._order if event != END}
        at_work = self._owners.lists_at_work(self._comm, self._device)
        return skipped_blocks(called, self._titles, at_work)

    def is_repeated(self, group: Any) -> bool:
        """Whether the pass in work has called a group several times, and so may sum its gradients
        several times.
        """
        return self._calls[id(group)] > 1

    def reset(self) -> None:
        """Go back to before the first pass: nothing is gathered, and no order is known."""
        forget_pass(self._root, self._states, self._groups)
        self._orders.clear()
        self.gradients.begin_step()
        self.gradients.drop()
        self._watches = self._has_left = False

    def end_call(self) -> None:
        """After a pass without backward. Its order is kept if every rank calls each block once.

        Otherwise the next pass is made in lockstep, too: blocks are skipped, or a text is generated
        whose length follows from the rows.
        """
        self._reach(END)
        skips = self._skips
        if self._learns:
            self._compare_counts()
            skipped = self._skipped_blocks()  # all ranks ask together
            skips = skips or bool(skipped)
        varies = self._counts.vary(self._key)
        if skips or self._has_diverged or varies or num_repeats(self._order):
            self._order.clear()
        self._watches = self._in_forward = False

    def _compare_counts(self) -> None:
        self._counts.compare(self._key, self._order, has_diverged=self._has_diverged)

    # What FSDP2 calls:

    def _unshard(self, group: Any, number: int, unshard: Callable[..., None], *rest: Any) -> None:
        is_gathered = group.is_unsharded or group._all_gather_result is not None  # noqa: SLF001
        is_needed = not is_gathered or number in self._left
        self._left.discard(number)
        if is_needed and not self._reach(2 * number):
            return  # a prefetch that the order doesn't have here
        if self._in_forward and not self._takes_part and torch.is_grad_enabled():
            self._awaited.add(number)
        unshard(*rest)

    def _pre_forward(
        self,
        group: Any,
        pre_forward: Callable[..., Any],
        module: nn.Module,
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Let a block's inputs need a gradient, where blocks may be skipped.

        FSDP2 sums a block's gradients when those of its inputs are there; without any, at the end
        of backward. Which of the two must not follow from what this rank has skipped before. The
        root's gradients are always summed at the end.
        """
        if self._in_forward:
            self._calls[id(group)] += 1
        is_block = group not in self._of_root
        if is_block and self._skips and self._in_forward and torch.is_grad_enabled():
            args, kwargs = needing_gradient((args, kwargs))
        with keep_frozen(group):
            return pre_forward(module, args, kwargs)

    def _prefetch(self, prefetch: Callable[[], None]) -> None:
        if self._in_forward:  # a gradient within the forward pass
            return
        self._prefetches = True
        try:
            prefetch()
        finally:
            self._prefetches = False

    def _post_backward(
        self, group: Any, number: int, post_backward: Callable[..., None], *rest: Any
    ) -> None:
        """Gradients that this rank's rows did not give are zero: others may have them.

        torch before 2.13 ends a pass with one call for each module of a group; all but the first
        have nothing to sum.
        """
        if self._watches and self._in_forward:
            self._has_inner_backward = True
            return
        if self._has_inner_backward and not self._sums_all:
            return
        is_uncalled = self._watches and number not in self._called
        if is_uncalled and self.gradients.are_kept(number):
            return  # of an earlier round: finish() sums them
        if is_uncalled or (is_idle(group) and number in self._summed):
            post_backward(*rest)
            return
        self._awaited.discard(number)
        if not self._reach(2 * number + 1):
            return  # backward's end calls this function again
        self._summed.add(number)
        self._sums[number](*rest)

    def _end_backward(self, callback: Callable[[], None]) -> None:
        """All gradients are computed; sum those that are not summed yet, the last block's first."""
        if self._watches and self._in_forward:
            begin_anew(self._states, self._groups)  # the forward pass goes on as if there was none
            return
        self._awaited.clear()
        self._sums_all = True
        for number in self._called if self._watches else ():
            if number not in self._summed:
                self._groups[number].post_backward()
        self._sums_all = self._has_inner_backward = False
        callback()

    # How a rank keeps to the order:

    def _reach(self, event: int) -> bool:
        """Take part in what comes before an event of this rank, whose turn it then is.

        Returns False where it is not: weights would be gathered ahead of their turn, or gradients
        be summed before others that this rank has yet to compute.
        """
        if not self._watches or self._takes_part:
            return True
        while True:
            due = self._agree(event) if self._learns else self._next(event)
            if due != event and self._prefetches and not self._learns:
                return False
            if due != event and is_sum(due) and due // 2 in self._awaited:
                if is_sum(event) and not self._learns:
                    return False
                raise self._disagreement({event, due})
            self._at += 1
            if due == event:
                return True
            self._take_part(due)
            if self._prefetches:
                return False

    def _next(self, event: int) -> int:
        """The next event in the order.

        UserError: this rank's event does not come in this pass any more
        """
        rest = self._order[self._at :]
        if self._in_forward and self._counts.vary(self._key):
            return rest[0] if rest[0] != END else self._next_beyond_the_order(event)
        if event not in rest[: rest.index(END) + 1] and not self._prefetches:
            raise self._disagreement({event, rest[0]})
        return rest[0]

    def _next_beyond_the_order(self, event: int) -> int:
        """Ask at the end of a forward pass whether some rank has one more event. If so, the pass is
        learnt from there on.
        """
        rest = self._order[self._at :]
        del self._order[self._at :]
        due = self._agree(event)
        if due == END:
            self._order[self._at :] = rest
        else:
            self._learns = True
        return due

    def _agree(self, event: int) -> int:
        """Choose, together with all ranks, the event that comes next, and note it in the order."""
        table = torch.zeros(self._comm.world_size, dtype=torch.float64, device=self._device)
        table[self._comm.rank] = event
        events = {int(one) for one in self._comm.all_reduce(table)().tolist()}
        self._has_diverged |= len(events) > 1
        due = events.pop() if len(events) == 1 else self._choose(events)
        self._order.append(due)
        return due

    def _choose(self, events: set[int]) -> int:
        """Blocks go forward in the order of their numbers, and backward in the order of calls."""
        gathers = [event for event in events if event != END and not is_sum(event)]
        if self._in_forward:
            return min(gathers)
        called = self._order[: self._order.index(END)]

        def last_call(event: int) -> int:
            gather = event - event % 2
            return max((at for at, one in enumerate(called) if one == gather), default=-1)

        sums = [event for event in events if is_sum(event)]
        return max(gathers or sums, key=last_call)

    def _take_part(self, event: int) -> None:
        """Do with the other ranks what this rank's own pass does not."""
        group = self._groups[event // 2]
        prefetches, self._takes_part, self._prefetches = self._prefetches, True, False
        try:
            if is_sum(event):
                group.wait_for_unshard()
                self._summed.add(event // 2)
                self._sums[event // 2]()
            elif self._in_forward:
                group.pre_forward(None, (), {})
                group.post_forward(None, None, None)
            else:
                gather_for_backward(group)
        finally:
            self._takes_part, self._prefetches = False, prefetches

    def _disagreement(self, events: set[int]) -> UserError:
        titles = sorted({self._titles[event // 2] for event in events if event != END})
        return UserError(
            f"fsdp: {' or '.join(titles)} is called in another order by some ranks than by others,"
            " or than in the first step, and its weights are gathered by all ranks together",
            "call the blocks in one order in every forward pass; put them in a block that is always"
            " called; or --strategy ddp",
            "model",
        )
