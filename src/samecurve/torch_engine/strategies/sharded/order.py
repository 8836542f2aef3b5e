"""The order in which groups of weights are gathered and summed, the same on all ranks.

All ranks must gather the same group at the same time: else they would wait for each other, or take
one group's weights for another's. A rank may call fewer blocks than its peers, because none of its
rows needs them (experts) or because they are skipped at random (LayerDrop). It then takes part in
what the others do: it gathers the group without using it, and adds zeros to its gradient.

The first pass is made in lockstep: before each gather the ranks agree on what comes next. Later
passes follow the order that it has found, each group's sum at its place in that order. If ranks
went different ways, or skipped blocks, the order is that of the blocks' numbers; a model that calls
them otherwise goes on in lockstep, and so does one that has called no block of a list yet.

A group that a function has called several times in one pass stays whole until the pass ends, from
the next training pass of that function on: a model that works through its rows in chunks calls
blocks now more often, now less.
"""

from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import nn

from samecurve.errors import UserError
from samecurve.torch_engine.process_group import Comm
from samecurve.torch_engine.strategies.sharded.gathers import (
    Key,
    Sums,
    another_frozen,
    another_order,
    late_gradient,
)
from samecurve.torch_engine.strategies.sharded.group import WeightGroup
from samecurve.torch_engine.strategies.sharded.link import ShardLink
from samecurve.torch_engine.strategies.sharded.skipped_blocks import ListOwners, skipped_blocks

_END = -1


@dataclass(frozen=True)
class Order:
    """The order of one kind of pass, by numbers of groups; each at most once in a direction.

    sums_at: groups that are summed once the backward pass has begun a gather, by its place
    stays: the group that stays whole from the end of the forward pass, as backward needs it first
    frozen: the names of the trained weights that the loss had frozen
    """

    forward: list[int]
    backward: list[int]
    sums_at: dict[int, list[int]]
    stays: int | None
    frozen: AbstractSet[str] = frozenset()


@dataclass
class _Pass:
    """The pass in work.

    order: that it follows; None: it is made in lockstep
    repeated: groups that a pass of this function has called several times
    """

    key: Key
    trains: bool
    order: Order | None
    repeated: set[int]
    is_backward: bool = False
    at: int = 0  # the place of the next gather in the direction at work
    forward: list[int] = field(default_factory=list)  # what a pass in lockstep has agreed on
    backward: list[int] = field(default_factory=list)
    has_diverged: bool = False
    reached: set[int] = field(default_factory=set)  # groups, in the direction at work

    @property
    def kept_whole(self) -> set[int]:
        """Groups that stay whole until this pass ends, once they are gathered."""
        return self.repeated if self.trains else set()

    @property
    def agreed(self) -> list[int]:
        return self.backward if self.is_backward else self.forward

    def last_call(self, number: int) -> int:
        """The place of a group's last gather in the forward pass; -1: it had none."""
        places = [place for place, one in enumerate(self.forward) if one == number]
        return places[-1] if places else -1

    @property
    def events(self) -> list[int]:
        assert self.order is not None
        return self.order.backward if self.is_backward else self.order.forward


class GatherOrder:
    """Gathers the groups of a model.

    model: that the groups' titles are names in
    comm: all ranks, which agree on one order for all copies of the model
    keeps_whole: whether blocks stay whole from the forward pass to their last gradient. The order
        of a backward pass is then that in which the blocks are reached, to be summed.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[WeightGroup],
        sums: Sums,
        link: ShardLink,
        comm: Comm,
        *,
        keeps_whole: bool,
    ) -> None:
        self._keeps_whole = keeps_whole
        self._groups, self._sums, self._link, self._comm = groups, sums, link, comm
        self._roots = [group.number for group in groups if group.is_root]
        self._blocks = [group for group in groups if not group.is_root]
        self._in_sum_order = [group for group in reversed(groups) if group.trained]
        self._titles = [group.title for group in groups]
        self._owners = ListOwners(model, [group.title for group in self._blocks])
        self._orders: dict[Key, Order] = {}
        # by function: groups that stay whole until its training pass ends; they outlive a reset
        self._repeated: dict[Key, set[int]] = {}
        self._title_last = ""  # of the group that was needed last
        self._pass: _Pass | None = None

    @property
    def is_at_work(self) -> bool:
        return self._pass is not None

    @property
    def is_backward(self) -> bool:
        return self._pass is not None and self._pass.is_backward

    @property
    def trains(self) -> bool:
        return self._pass is not None and self._pass.trains

    def begin_step(self) -> None: ...

    def begin(self, key: Key, *, trains: bool) -> None:
        self._abandon()
        kept_whole = self._repeated.setdefault(key, set())
        full_key = (*key, trains, torch.is_grad_enabled())
        self._pass = _Pass(full_key, trains, self._orders.get(full_key), kept_whole)
        self._link.begin_pass()
        if self._pass.order is None:
            self._owners.watch()
        for group in self._groups:
            if group.is_root:
                self.need(group)
                group.swap_in()

    def need(self, group: WeightGroup) -> None:
        """UserError: the gather of this group does not come in this pass any more."""
        if group.is_whole:
            return
        self._reach(group.number)
        if not group.is_whole:
            raise late_gradient(group)

    def stays_after_call(self, group: WeightGroup) -> bool:
        now = self._pass
        if now is None or now.is_backward or group.is_held or (self._keeps_whole and now.trains):
            return True
        is_first_in_backward = now.order is not None and now.order.stays == group.number
        return is_first_in_backward or group.number in now.kept_whole

    def need_in_backward(self, group: WeightGroup) -> None:
        """Gather a group. Beside the computation of the first one, which has stayed whole, the next
        one is gathered.
        """
        now = self._pass
        if now is None or group.is_complete:
            return
        if self._keeps_whole and group.number not in {*now.reached, *now.kept_whole}:
            self._reach(group.number)
        self.need(group)
        order = now.order
        if order is not None and group.number == order.stays and order.backward and not now.at:
            self._groups[order.backward[0]].start()

    def end_forward(self) -> None:
        now = self._pass
        assert now is not None
        self._reach(_END)
        now.is_backward, now.at = True, 0
        now.reached.clear()

    def end(self, *, is_last: bool = True) -> None:
        """Take part in what other ranks have yet to do, and sum what is left."""
        del is_last  # each pass gathers for itself
        now = self._pass
        if now is None:
            return
        self._reach(_END)
        if now.trains:
            for group in self._in_sum_order:
                if not group.is_summed:
                    self._sums.send(group)
        if now.order is None:
            self._learn(now)
        self._end_pass()

    def _abandon(self) -> None:
        """Leave a pass that an error, or the lack of a backward pass, has ended halfway."""
        if self._pass is not None:
            self._end_pass()

    def reset(self) -> None:
        self._abandon()
        self._orders.clear()

    def gradient_came(self, group: WeightGroup) -> None:
        """UserError: the group has been summed already."""
        now = self._pass
        if now is None or not now.is_backward:
            return
        if group.is_summed:
            raise late_gradient(group)
        group.last_gradient = len(now.agreed)
        is_kept = group.is_root or group.is_held or group.number in now.kept_whole
        if group.is_complete and not (is_kept or group.has_frozen):
            group.free()

    def _end_pass(self) -> None:
        self._pass, self._title_last = None, ""
        for group in self._groups:
            group.end_pass()

    # --- one gather after another

    @torch.no_grad()
    def _reach(self, number: int) -> None:
        """Do all that comes before the gather of a group, and that gather."""
        now = self._pass
        assert now is not None
        follow = self._follow if now.order is not None else self._agree
        while follow(now, number) not in {number, _END}:
            pass
        self._title_last = "" if number == _END else self._titles[number]

    def _follow(self, now: _Pass, number: int) -> int:
        """Do what comes next in the order. Returns the group that was gathered."""
        events = now.events
        if now.at == len(events):
            if number != _END:
                raise self._disagreement(now, [number])
            return _END
        if number != _END and number not in events[now.at :]:
            raise self._disagreement(now, [number, events[now.at]])
        due, place = events[now.at], now.at
        now.at += 1
        group = self._groups[due]
        if self._gathers(now):
            group.start()
        if now.is_backward and now.order is not None:
            for summed in now.order.sums_at.get(place, ()):
                self._sums.send(self._groups[summed])
        self._finish(now, group, is_needed=due == number)
        if now.at < len(events) and self._gathers(now):
            self._groups[events[now.at]].start()  # beside the computation, in memory that is free
        return due

    def _gathers(self, now: _Pass) -> bool:
        """Whether a group is gathered as it is reached, and not whole already."""
        return not (self._keeps_whole and now.is_backward)

    def _agree(self, now: _Pass, number: int) -> int:
        """Do what all ranks agree on: they gather one of the groups that they ask for, after they
        have summed those whose gradients all of them have.
        """
        groups = self._groups
        own = torch.zeros(1 + len(groups), dtype=torch.int64)
        own[0] = number
        if now.is_backward:
            own[1:] = torch.tensor([self._can_be_summed(group, now) for group in groups])
        table = self._rows_of_all(own)
        asked = {int(one) for one in table[:, 0]}
        can_be_summed = table[:, 1:].all(0).tolist()
        for group in self._in_sum_order if now.is_backward else ():
            if can_be_summed[group.number] and not group.is_summed:
                self._sums.send(group)
        now.has_diverged |= len(asked) > 1
        asked.discard(_END)
        if not asked:
            return _END
        due = max(asked, key=now.last_call) if now.is_backward else min(asked)
        now.agreed.append(due)
        if self._gathers(now):
            groups[due].start()
        self._finish(now, groups[due], is_needed=due == number)
        return due

    def _rows_of_all(self, own: torch.Tensor) -> torch.Tensor:
        """What all ranks say, [ranks, size]. own: what this rank says"""
        table = own.new_zeros(self._comm.world_size, len(own))
        table[self._comm.rank] = own
        return self._comm.all_reduce(table.to(self._link.device))().cpu()

    def _can_be_summed(self, group: WeightGroup, now: _Pass) -> bool:
        """Whether this rank has all gradients of a group, and no more will come."""
        may_get_more = group.is_root or group.is_held or group.number in now.kept_whole
        return group.is_complete and not may_get_more and now.forward.count(group.number) == 1

    def _finish(self, now: _Pass, group: WeightGroup, *, is_needed: bool) -> None:
        now.reached.add(group.number)
        if not self._gathers(now):
            return
        stays = group.number in now.kept_whole or (self._keeps_whole and now.trains)
        if now.is_backward and is_needed:
            self._free_frozen(now, group)
        group.finish(keep=is_needed or stays)

    def _free_frozen(self, now: _Pass, needed: WeightGroup) -> None:
        """Give back groups with frozen weights, of whose use in backward no gradient tells the end:
        those of other blocks than are at work. What a checkpoint has computed again keeps views of
        them, and asks for no weight a second time. A block's weights of several number formats are
        several groups, which one operation may take together (codes and scales).
        """
        at_work = {needed.title, self._title_last}
        for group in self._blocks:
            is_in_use = group.title in at_work or group.is_held or group.number in now.kept_whole
            is_done = group.is_complete or not group.trained
            if group.is_whole and group.has_frozen and is_done and not is_in_use:
                group.free()

    # --- what a pass in lockstep has taught

    def _learn(self, now: _Pass) -> None:
        """Keep the order of a pass; all ranks call it together."""
        at_work = self._owners.lists_at_work(self._comm, self._link.device)
        repeated = {
            number
            for numbers in (now.forward, now.backward)
            for number, count in Counter(numbers).items()
            if count > 1
        }
        called = set(now.forward).difference(self._roots)
        skipped = self._skipped(called, at_work)
        late = self._late(now) if now.trains else set()
        if not repeated <= now.repeated:
            now.repeated |= repeated
            self._forget_orders(now.key)
            return
        if not now.trains:
            if not (now.repeated or skipped or now.has_diverged):
                self._orders[now.key] = Order(now.forward, [], {}, None)
            return
        if skipped - self._skipped(called, ()):
            return  # nobody has seen yet where the blocks of such a list are called
        forward, backward = now.forward, now.backward
        if skipped or now.has_diverged:
            in_turn = [number for number in forward if number in called]
            if in_turn != sorted(in_turn):
                return
            blocks = sorted(called | skipped)
            forward = [*self._roots, *blocks]
            backward = [number for number in reversed(blocks) if number not in now.repeated]
        self._orders[now.key] = self._order(forward, backward, {*late, *now.repeated})

    def _forget_orders(self, key: Key) -> None:
        """Learn the order of a function's passes again. key: of one of them"""
        for other in [other for other in self._orders if other[:-2] == key[:-2]]:
            del self._orders[other]

    def _skipped(self, called: set[int], at_work: Sequence[str]) -> set[int]:
        """The groups of blocks that no rank has called, in lists whose blocks are at work."""
        numbers = [group.number for group in self._blocks]
        titles = [group.title for group in self._blocks]
        places = {place for place, number in enumerate(numbers) if number in called}
        found = skipped_blocks(places, titles, at_work)
        return {numbers[place] for of_block in found for place in of_block}

    def _late(self, now: _Pass) -> set[int]:
        """The groups that are summed when the backward pass has ended: those of which some rank
        had a gradient after the gather at which they would be summed, or whose weights it has read
        outside of their block.
        """
        own = torch.zeros(len(self._groups), dtype=torch.float64)
        for group in self._blocks:
            is_late = group.is_held
            if group.number in now.backward:
                is_late |= group.last_gradient > now.backward.index(group.number) + 1
            own[group.number] = float(is_late)
        flags = self._comm.all_reduce(own.to(self._link.device))().tolist()
        return {number for number, flag in enumerate(flags) if flag}

    def _order(self, forward: list[int], backward: list[int], late: set[int]) -> Order:
        """The order of these gathers, with the place of each sum."""
        stays = None
        if forward and backward and forward[-1] == backward[0] and not self._keeps_whole:
            stays, backward = backward[0], backward[1:]
        sums_at: dict[int, list[int]] = {}
        in_turn = backward if stays is None else [stays, *backward]
        left_out = {*late, *self._roots}
        for number, following in pairwise(in_turn):
            if self._groups[number].trained and number not in left_out:
                sums_at.setdefault(backward.index(following), []).append(number)
        return Order(forward, backward, sums_at, stays, self._frozen())

    def _frozen(self) -> set[str]:
        """The names of the trained weights that the loss has frozen."""
        trained = [weight for group in self._in_sum_order for weight in group.trained]
        return {weight.name for weight in trained if not weight.whole.requires_grad}

    def _disagreement(self, now: _Pass, numbers: Sequence[int]) -> UserError:
        frozen = self._frozen()
        if now.order is not None and (changed := sorted(frozen ^ now.order.frozen)):
            return another_frozen(changed[0], is_frozen=changed[0] in frozen)
        return another_order(sorted({self._titles[number] for number in numbers}))
