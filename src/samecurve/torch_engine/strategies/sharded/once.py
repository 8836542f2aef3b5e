"""A step that gathers its weights once, and sums its gradients once.

Weights are whole on each rank through the rounds of a step. The first pass gathers all groups, in
the order of their numbers. In the last backward pass groups are summed in the opposite order, each
as soon as its gradients are there.
"""

from collections.abc import Callable, Sequence

import torch

from samecurve.core.determinism.microbatches import Node, TreeSum
from samecurve.torch_engine.strategies.reducers.tree import NodesByRank, add_gradients, send_nodes
from samecurve.torch_engine.strategies.sharded.exchange import FlatTree
from samecurve.torch_engine.strategies.sharded.gathers import Key, late_gradient
from samecurve.torch_engine.strategies.sharded.group import Gradients, WeightGroup
from samecurve.torch_engine.strategies.sharded.link import ShardLink
from samecurve.torch_engine.strategies.sharded.sums import Numbers


class OnceSums:
    """Sums of a step whose gradients are whole on each rank until its last round.

    In the tree's order this rank adds up its neighbouring microbatches by itself; as on one device,
    autograd adds the gradient of an odd microbatch to that of the even one before it.

    is_tree: whether gradients are added along the step's tree
    nodes: (microbatches of a step) -> the nodes that each rank has of its own
    used: names of the weights to which this rank's microbatches of the step gave a gradient
    is_last: whether the step's last round is in work
    """

    def __init__(
        self,
        groups: Sequence[WeightGroup],
        link: ShardLink,
        nodes: Callable[[int], NodesByRank],
        *,
        is_tree: bool,
    ) -> None:
        self._groups = [group for group in reversed(groups) if group.trained]
        self._link, self._nodes, self._is_tree = link, nodes, is_tree
        self.used: set[str] = set()
        self._own: dict[int, TreeSum[Gradients]] = {}  # by group's number
        self._wide: dict[int, Gradients] = {}  # of weights in two bytes: what earlier rounds gave
        self._node: Node | None = None  # that the microbatch in work is, or completes
        self._is_real = self.is_last = False
        self._count = 0  # microbatches of the step
        self._num_added = 0  # groups to which this round's gradients were added
        self._on_their_way: list[tuple[WeightGroup, Callable[[], torch.Tensor | FlatTree]]] = []
        self._sums: dict[int, torch.Tensor | FlatTree] = {}

    def begin_step(self, num_microbatches: int) -> None:
        self.drop()
        self.used.clear()
        self._count = num_microbatches
        self._own = {
            group.number: TreeSum(num_microbatches, add_gradients) for group in self._groups
        }

    def begin_round(self, numbers: Numbers, *, is_real: bool, is_last: bool) -> None:
        self._is_real, self.is_last, self._num_added = is_real, is_last, 0
        if not self._is_tree:
            return
        (number,) = numbers
        self._node = None if number is None else (0, number)
        for group in self._groups:
            own = self._own[group.number]
            if number is not None and number % 2 and own.take((0, number - 1)) is not None:
                self._node = (1, number // 2)
            else:
                group.drop_gradients()

    def has_gradient(self, _group: WeightGroup) -> None:
        """Add up the groups whose turn it is; in the last round they are sent."""
        groups = self._groups
        while self._num_added < len(groups) and groups[self._num_added].is_complete:
            self._add_next()

    def end_round(self) -> None:
        while self._num_added < len(self._groups):
            self._add_next()

    def _add_next(self) -> None:
        """Add this round's gradients of the next group. In the last round the group is sent."""
        group = self._groups[self._num_added]
        self._num_added += 1
        if self._is_real:
            self.used |= group.names_with_gradient()
        if not self._is_tree:
            self._widen(group)
        elif self._node is None:
            group.drop_gradients()
        else:
            self._own[group.number].give(self._node, group.gradients())
        if self.is_last:
            group.is_summed = True
            self._send(group)

    @torch.no_grad()
    def _widen(self, group: WeightGroup) -> None:
        """Add gradients in two bytes in the format of the weights; others autograd adds."""
        wide = self._wide.setdefault(group.number, [None] * len(group.trained))
        for place, weight in enumerate(group.trained):
            gradient, before = weight.whole.grad, wide[place]
            if gradient is None or gradient.dtype == weight.dtype:
                continue
            if before is None:
                wide[place] = gradient.to(weight.dtype)
            else:
                before.add_(gradient)
            weight.whole.grad = None

    @torch.no_grad()
    def _send(self, group: WeightGroup) -> None:
        """Send whole gradients, whose memory is let go of as they are packed."""
        self.finish()  # of the group before, which had the time of a block to arrive
        send = self._send_nodes if self._is_tree else self._send_sum
        self._on_their_way.append((group, send(group)))

    def _send_nodes(self, group: WeightGroup) -> Callable[[], torch.Tensor | FlatTree]:
        count, comm = self._count, self._link.comm
        held, packed = self._own.pop(group.number).held, []
        group.drop_gradients()
        while held:
            packed.append(group.packed(held.pop(0)[1]))
        received = send_nodes(packed, self._nodes(count), comm, group.like_packed())

        def along_tree() -> FlatTree:
            tree = FlatTree(count)
            tree.give(received())
            return tree

        return along_tree

    def _send_sum(self, group: WeightGroup) -> Callable[[], torch.Tensor | FlatTree]:
        wide = self._wide.pop(group.number)
        sent = group.packed(
            [own if one is None else one for one, own in zip(wide, group.gradients(), strict=True)]
        )
        wide.clear()
        group.drop_gradients()
        total = sent.new_empty(group.gradient_size)
        work = self._link.reduce_scatter(total, sent.view(-1))

        def by_library() -> torch.Tensor:
            work.wait()
            assert len(sent)  # which lives until then
            return total

        return by_library

    @torch.no_grad()
    def _receive(self) -> None:
        group, wait = self._on_their_way.pop(0)
        self._sums[group.number] = wait()

    def finish(self) -> None:
        while self._on_their_way:
            self._receive()

    def drop(self) -> None:
        """Let go of all sums, those of a step that was not finished, too."""
        self.finish()
        self._own.clear()
        self._wide.clear()
        self._sums.clear()
        for group in self._groups:
            group.drop_gradients()

    def held(self, group: WeightGroup) -> list[tuple[Node, torch.Tensor]]:
        tree = self._sums[group.number]
        assert isinstance(tree, FlatTree)
        return tree.held

    def take_totals(self) -> dict[int, torch.Tensor]:
        totals = {
            number: sum_.total() if isinstance(sum_, FlatTree) else sum_
            for number, sum_ in self._sums.items()
        }
        self.drop()
        return totals


class OnceOrder:
    """Gathers all groups in the first pass of a step, in the order of their numbers."""

    def __init__(self, groups: Sequence[WeightGroup], sums: OnceSums, link: ShardLink) -> None:
        roots = [group for group in groups if group.is_root]
        self._roots, self._sums, self._link = roots, sums, link
        self._groups = [*roots, *(group for group in groups if not group.is_root)]
        self._place = {group.number: place for place, group in enumerate(self._groups)}
        self._at = 0  # the place of the next gather
        self._in_step = False
        self.is_at_work = self.is_backward = self.trains = False

    def begin_step(self) -> None:
        self.reset()
        self._in_step = True

    def begin(self, key: Key, *, trains: bool) -> None:
        del key  # all passes gather in one order
        self._end_pass()
        self.is_at_work, self.trains = True, trains
        self._link.begin_pass()
        for group in self._roots:
            self.need(group)
            group.swap_in()

    def need(self, group: WeightGroup) -> None:
        """UserError: the group's weights have been given back in this backward pass."""
        if group.is_whole:
            return
        self._gather_to(self._place[group.number] + 1)
        if not group.is_whole:
            raise late_gradient(group)

    def need_in_backward(self, group: WeightGroup) -> None: ...

    def stays_after_call(self, _group: WeightGroup) -> bool:
        return True

    def gradient_came(self, group: WeightGroup) -> None:
        """In the step's last backward pass a group is given back with its last gradient.

        UserError: the group has been summed already.
        """
        if group.is_summed:
            raise late_gradient(group)
        if not (self.is_backward and group.is_complete):
            return
        is_used_up = self._sums.is_last and len(group.trained) == len(group.weights)
        if is_used_up and not (group.is_root or group.is_held):
            group.free()
        self._sums.has_gradient(group)

    def end_forward(self) -> None:
        self._gather_to(len(self._groups))
        self.is_backward = True

    def end(self, *, is_last: bool = True) -> None:
        if not self.is_at_work:
            return
        if not self.is_backward:
            self._gather_to(len(self._groups))
        self._end_pass()
        if self.trains and is_last:
            self._in_step = False
        if not self._in_step:
            self.reset()

    def reset(self) -> None:
        self._end_pass()
        self._in_step, self._at = False, 0
        for group in self._groups:
            group.end_pass()

    def _end_pass(self) -> None:
        self.is_at_work = self.is_backward = False
        for group in self._groups:
            group.swap_out()
            group.with_gradient.clear()
            group.is_held = group.is_summed = False

    @torch.no_grad()
    def _gather_to(self, end: int) -> None:
        """Gather the groups before this place; the next one is on its way meanwhile."""
        while self._at < end:
            group = self._groups[self._at]
            group.start()
            self._at += 1
            group.finish(keep=True)
            if self._at < len(self._groups):
                self._groups[self._at].start()
