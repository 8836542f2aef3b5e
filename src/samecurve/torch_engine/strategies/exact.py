"""train.exact: the gradients of microbatches are added along the step's tree
(core/determinism/microbatches.py), so that the sum has the same bits on any devices.

autograd itself adds the gradient of every second microbatch to that of its left neighbour, so
gradient accumulation costs what it always does. Several processes exchange their gradients bucket
by bucket, while the last backward pass still runs (exact_allreduce.py).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from samecurve.core.determinism.microbatches import Node, TreeSum
from samecurve.core.planning.plan import Plan
from samecurve.core.protocols import MicroBatch
from samecurve.errors import UserError
from samecurve.torch_engine.optimizers.optimizer import OptimizerParam
from samecurve.torch_engine.process_group import Comm, Peers
from samecurve.torch_engine.strategies.base import Materialize
from samecurve.torch_engine.strategies.dp import DP
from samecurve.torch_engine.strategies.exact_allreduce import (
    ExactAllReduce,
    Gradients,
    Held,
)
from samecurve.torch_engine.strategies.exact_norm import RowSquares, norm_of_rows

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

_BUCKET_BYTES = 8 << 20


def set_deterministic(enabled: bool, /) -> None:  # noqa: FBT001 - as torch's own
    """Choose kernels that give the same bits each time; or, when disabled, the fastest kernels.

    An operation that has no deterministic kernel raises an error when it runs.
    """
    torch.use_deterministic_algorithms(enabled)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = enabled
    torch.backends.cuda.enable_cudnn_sdp(not enabled)  # its backward has no deterministic form


class Exact(DP):
    """The exact form of single, dp and ddp: a bare replica for each device of this process."""

    def __init__(self, plan: Plan, comm: Comm, devices: Sequence[torch.device]) -> None:
        set_deterministic(True)
        super().__init__(plan, comm, devices)
        # torch's part in C++ holds them, where Python's garbage collector sees no cycle: left in
        # place, they would keep the whole model in a warm process
        self._hooks: list[RemovableHandle] = []

    def close(self) -> None:
        super().close()
        set_deterministic(False)
        for hook in self._hooks:
            hook.remove()

    def distribute(self, models: list[nn.Module], materialize: Materialize) -> None:
        super().distribute(models, materialize)
        # the trained parameters, by device of this process
        self._parameters = [
            [parameter for parameter in model.parameters() if parameter.requires_grad]
            for model in self.models
        ]
        self._squares: RowSquares | None = None
        self._buckets = [slice(None)]
        self._all_reduce: ExactAllReduce | None = None
        if self._comm.group:
            self._buckets = _cut_into_buckets(self._parameters[0])
            buckets = [self._parameters[0][bucket] for bucket in self._buckets]
            self._all_reduce = ExactAllReduce(
                buckets, self._comm, self._plan.layout.backend, self._plan.batch.microbatches_of
            )
        # called in the last microbatch with each gradient as soon as it is there
        self._on_gradient: Callable[[nn.Parameter], None] | None = None
        self._fired: list[set[int]] = [set() for _ in self.models]
        # by device of this process: the node of the tree that its microbatch is, or completes
        self._nodes: list[Node] = [(0, 0) for _ in self.models]
        for parameters, fired in zip(self._parameters, self._fired, strict=True):
            for parameter in parameters:
                hook = partial(self._gradient_ready, fired)
                register: Any = parameter.register_post_accumulate_grad_hook
                self._hooks.append(register(hook))

    def peers(self) -> Sequence[Peers]:
        return [self._comm] if self._comm.group else super().peers()

    def begin_step(self, _parameters: Sequence[nn.Parameter], num_microbatches: int) -> None:
        self._num_microbatches = num_microbatches
        self._sums = [
            [TreeSum[Gradients](num_microbatches, add_gradients) for _ in self._buckets]
            for _ in self.models
        ]
        self._num_sent = 0  # buckets on their way
        self._with_gradient: set[int] = set()  # ids of the first replica's parameters
        for parameters in self._parameters:
            _clear(parameters)

    def begin_microbatch(self, device_index: int, microbatch: MicroBatch, *, is_last: bool) -> None:
        """Before a microbatch.

        The backward pass of an odd microbatch adds to the gradients of the even one before it, if
        this device has that one. Any other microbatch begins without gradients.
        """
        sums, number = self._sums[device_index], microbatch.number
        left_siblings = [one.take((0, number - 1)) for one in sums] if number % 2 else [None]
        paired = left_siblings[0] is not None  # in every bucket, or in none
        node = (1, number // 2) if paired else (0, number)
        if not paired:
            _clear(self._parameters[device_index])
        overlaps = is_last and self._all_reduce and len(self.models) == 1
        self._on_gradient = self._sender(node) if overlaps else None
        self._fired[device_index].clear()
        self._nodes[device_index] = node

    def end_microbatch(self, device_index: int, _microbatch: MicroBatch) -> None:
        self._on_gradient = None
        for bucket in range(self._num_sent, len(self._buckets)):
            self._add_to_tree(device_index, bucket, self._nodes[device_index])

    def _add_to_tree(self, device_index: int, bucket: int, node: Node) -> None:
        parameters = self._parameters[device_index][self._buckets[bucket]]
        gradients = [parameter.grad for parameter in parameters]
        self._sums[device_index][bucket].give(node, gradients)

    def _sender(self, node: Node) -> Callable[[nn.Parameter], None]:
        """A function that sends each bucket, in their order, once its last gradients are there.

        node: the place of the last microbatch in the tree
        """
        parameters = self._parameters[0]
        bucket_of = {
            id(parameter): number
            for number, bucket in enumerate(self._buckets)
            for parameter in parameters[bucket]
        }
        missing = [len(parameters[bucket]) for bucket in self._buckets]

        def on_gradient(parameter: nn.Parameter) -> None:
            missing[bucket_of[id(parameter)]] -= 1
            while self._num_sent < len(missing) and not missing[self._num_sent]:
                self._add_to_tree(0, self._num_sent, node)
                self._send()

        return on_gradient

    def _gradient_ready(self, fired: set[int], parameter: nn.Parameter) -> None:
        """Pass on a gradient that backward has finished."""
        note_gradient(fired, parameter)
        if self._on_gradient:
            self._on_gradient(parameter)

    def _send(self) -> None:
        """Send the next bucket, and free the gradients that it was made of."""
        assert self._all_reduce is not None
        bucket, held = self._buckets[self._num_sent], self._sums[0][self._num_sent].held
        self._note_gradients(bucket, held)
        self._all_reduce.send(self._num_sent, held, self._num_microbatches)
        held.clear()
        _clear(self._parameters[0][bucket])
        self._num_sent += 1

    def _note_gradients(self, bucket: slice, held: Held) -> None:
        for _, gradients in held:
            pairs = zip(self._parameters[0][bucket], gradients, strict=True)
            self._with_gradient |= {id(one) for one, gradient in pairs if gradient is not None}

    def has_gradient(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._with_gradient

    def norm(
        self, _trained: Sequence[OptimizerParam], gradients: list[torch.Tensor]
    ) -> torch.Tensor:
        shapes = [gradient.shape for gradient in gradients]
        if self._squares is None or self._squares.shapes != shapes:  # of the step's other update
            self._squares = RowSquares(gradients)
        return norm_of_rows(self._squares(gradients))

    def reduce(self, parameters: Sequence[nn.Parameter]) -> None:
        if self._all_reduce:
            while self._num_sent < len(self._buckets):
                self._send()
            self._all_reduce.finish()
        else:
            self._sum_over_devices(parameters)

    def _sum_over_devices(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sum over the devices of this process, which is the only one."""
        total: TreeSum[Gradients] = TreeSum(self._num_microbatches, add_gradients)
        device = self._devices[0]
        for sums in self._sums:
            self._note_gradients(slice(None), sums[0].held)
            for node, held in sums[0].held:
                total.give(node, [None if grad is None else grad.to(device) for grad in held])
        self._sums = []
        for others in self._parameters[1:]:
            _clear(others)
        summed = total.total()
        if present := [gradient for gradient in summed if gradient is not None]:
            torch._foreach_add_(present, 0.0)  # as without_negative_zeros()
        for parameter, gradient in zip(parameters, summed, strict=True):
            parameter.grad = _laid_out(gradient, parameter)


def note_gradient(fired: set[int], parameter: nn.Parameter) -> None:
    """Note that a backward pass has given a parameter its gradient.

    fired: ids of the parameters that have one from this pass

    UserError: one backward pass adds to the gradient several times, which the tree can't
    reproduce; or the gradient is sparse.
    """
    if id(parameter) in fired:
        raise UserError(
            "train.exact: a backward pass adds to the same gradient several times, as"
            " torch.utils.checkpoint does with use_reentrant=True",
            "use_reentrant=False, or train.recompute, or --no-exact",
            "model",
        )
    if parameter.grad is not None and parameter.grad.is_sparse:
        raise UserError(
            "train.exact: a layer gives sparse gradients",
            "sparse=False (nn.Embedding), or --no-exact",
            "model",
        )
    fired.add(id(parameter))


def add_gradients(left: Gradients, right: Gradients) -> Gradients:
    """The sum of two nodes of a step's tree, in the memory of the left one where it has some."""
    both = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if both:
        torch._foreach_add_([a for a, _ in both], [b for _, b in both])
    return [b if a is None else a for a, b in zip(left, right, strict=True)]


def _clear(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


def _laid_out(gradient: torch.Tensor | None, parameter: nn.Parameter) -> torch.Tensor:
    """The gradient with the parameter's strides, as ExactAllReduce leaves it; zeros where no
    microbatch used the parameter.
    """
    if gradient is None:
        return torch.zeros_like(parameter)
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


def _cut_into_buckets(parameters: Sequence[nn.Parameter]) -> list[slice]:
    """Buckets of neighbouring parameters, some megabytes each.

    The last parameters come first, since their gradients are there first.
    """
    buckets, end, size = [], len(parameters), 0
    for number in reversed(range(len(parameters))):
        size += parameters[number].nbytes
        if size >= _BUCKET_BYTES or number == 0:
            buckets.append(slice(number, end))
            end, size = number, 0
    return buckets
