"""Buckets: gradients of neighbouring parameters, side by side in one piece of memory, which are
sent together while the last backward pass of a step still runs.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from samecurve.core.strategies import BUCKET_BYTES
from samecurve.errors import UserError
from samecurve.torch_engine.optimizers.optimizer import local_view

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

Gradients = list[torch.Tensor | None]  # one for each parameter of a bucket
_ALIGN = 16  # numbers: parameters begin at multiples, for vector instructions, on any ranks


class Bucket:
    """Parameters of one number format, and pieces of memory for their gradients.

    Complex numbers are pairs of real ones there.

    num_shards: the memory can be cut into so many parts of one size
    """

    def __init__(self, parameters: Sequence[nn.Parameter], num_shards: int = 1) -> None:
        self.parameters = parameters
        first = local_view(parameters[0].detach())
        self.dtype, self.device = first.dtype, first.device
        self._extents: list[tuple[int, int]] = []
        end = 0
        for parameter in parameters:
            size = local_view(parameter.detach()).numel()
            self._extents.append((end, size))
            end += -(-size // _ALIGN) * _ALIGN
        self.shard_size = -(-end // (num_shards * _ALIGN)) * _ALIGN
        self.size = self.shard_size * num_shards
        self._pieces: list[tuple[torch.Tensor, list[torch.Tensor]]] = []

    def piece(self, number: int = 0) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """A piece of memory, which stays, and its views by parameter; zeros at first."""
        if number == len(self._pieces):
            flat = torch.zeros(self.size, dtype=self.dtype, device=self.device)
            pairs = zip(self._extents, self.parameters, strict=True)
            views = [_shaped(flat[at : at + size], one) for (at, size), one in pairs]
            self._pieces.append((flat, views))
        return self._pieces[number]

    @torch.no_grad()
    def filled(self, gradients: Gradients, number: int = 0) -> torch.Tensor:
        """A piece of memory with these gradients; zeros where a parameter has none."""
        flat, views = self.piece(number)
        pairs = list(zip(views, gradients, strict=True))
        present = [(view, grad) for view, grad in pairs if grad is not None and grad is not view]
        if present:
            torch._foreach_copy_([view for view, _ in present], [grad for _, grad in present])
        for view, gradient in pairs:
            if gradient is None:
                view.zero_()
        return flat

    def set_gradients(self) -> None:
        """Leave the first piece in the parameters' gradients."""
        for parameter, view in zip(self.parameters, self.piece()[1], strict=True):
            parameter.grad = view


def _shaped(flat: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """The view of a piece of memory as a gradient of this parameter, with the parameter's strides
    where these leave no gaps.
    """
    if parameter.is_complex():
        flat = torch.view_as_complex(flat.view(-1, 2))
    return flat.as_strided(parameter.shape, torch.empty_like(parameter, device="meta").stride())


def cut_into_buckets(parameters: Sequence[nn.Parameter]) -> list[slice]:
    """Buckets of neighbouring parameters of one number format, some megabytes each.

    The last parameters come first, since their gradients are there first.
    """
    buckets, end, size = [], len(parameters), 0
    for number in reversed(range(len(parameters))):
        size += parameters[number].nbytes
        is_full = size >= BUCKET_BYTES[local_view(parameters[number]).device.type]
        if is_full or number == 0 or _ends(parameters[number - 1], parameters[number]):
            buckets.append(slice(number, end))
            end, size = number, 0
    return buckets


def _ends(before: nn.Parameter, parameter: nn.Parameter) -> bool:
    """Whether the parameter before this one lies in another bucket, whatever its size."""
    kinds = [(local_view(one.detach()).dtype, one.device) for one in (before, parameter)]
    return kinds[0] != kinds[1]


class GradientQueue:
    """Watches backward passes, and sends buckets in their order, each once the last pass of a step
    has given all its gradients.

    Where a pass adds to a gradient several times (a reentrant checkpoint), nobody knows when it is
    whole. Along a tree that is refused; else the first step, which sends at the end of its pass,
    shows it, and all steps send there then.

    torch's part in C++ holds hooks, where Python's garbage collector sees no cycle: left in place
    they would keep the whole model in a warm process. So close() removes them.

    buckets: the parameters of each
    send: sends the bucket of this number; all ranks send in the same order
    in_pass: ids of the parameters with a gradient of the pass in work
    """

    def __init__(
        self,
        buckets: Sequence[Sequence[nn.Parameter]],
        send: Callable[[int], None] | None = None,
        *,
        exact: bool,
    ) -> None:
        self.in_pass: set[int] = set()
        self.sends = False  # whether the pass in work is a step's last
        self._sends_early = exact  # buckets are sent while that pass runs
        self._repeats = False  # a pass has added to a gradient several times
        self._is_open = False  # a pass of a microbatch is in work; trials have passes of their own
        self._num_sent, self._exact = 0, exact
        self._sizes = list(map(len, buckets))
        self._missing = list(self._sizes)
        self._send = send
        numbered = enumerate(buckets)
        self._bucket_of = {id(one): number for number, bucket in numbered for one in bucket}
        self._hooks: list[RemovableHandle] = []
        for parameter in (one for bucket in buckets for one in bucket):
            register: Any = parameter.register_post_accumulate_grad_hook
            self._hooks.append(register(self._gradient_ready))

    def begin_step(self) -> None:
        self._num_sent = 0

    def begin_pass(self, *, is_last: bool = False) -> None:
        self.in_pass.clear()
        self._is_open = True
        self.sends = is_last and self._send is not None
        if is_last:
            self._missing = list(self._sizes)

    def end_pass(self) -> None:
        """Send what the last pass did not complete, on this rank."""
        self._is_open = False
        if self.sends:
            self.send_rest()
            self._sends_early = not self._repeats
            self.sends = False

    def send_rest(self) -> None:
        while self._num_sent < len(self._sizes):
            self._send_next()

    def _gradient_ready(self, parameter: nn.Parameter) -> None:
        """Called for each gradient of each pass: one call of Python, and few operations."""
        if not self._is_open:
            return
        key = id(parameter)
        if key in self.in_pass or parameter.grad.is_sparse:  # type: ignore[union-attr]
            self._note_unusual(parameter)
        self.in_pass.add(key)
        if self.sends and self._sends_early:
            bucket = self._bucket_of[key]
            self._missing[bucket] -= 1
            if not self._missing[bucket] and bucket == self._num_sent:
                self._send_complete()

    def _note_unusual(self, parameter: nn.Parameter) -> None:
        """UserError: a gradient is sparse, or comes again where its bucket may be on its way."""
        if self._sends_early or self._exact or parameter.grad.is_sparse:  # type: ignore[union-attr]
            note_gradient(self.in_pass, parameter, exact=self._exact)
        self._repeats = True

    def _send_complete(self) -> None:
        while self._num_sent < len(self._sizes) and not self._missing[self._num_sent]:
            self._send_next()

    def _send_next(self) -> None:
        assert self._send is not None
        self._send(self._num_sent)
        self._num_sent += 1

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def note_gradient(fired: set[int], parameter: nn.Parameter, *, exact: bool) -> None:
    """Note that a backward pass has given a parameter its gradient.

    fired: ids of the parameters that have one from this pass

    UserError: one backward pass adds to the gradient several times, so nobody knows when it is
    whole, nor how it would be added along a tree; or the gradient is sparse.
    """
    why, otherwise = ("train.exact: ", ", or --no-exact") if exact else ("", "")
    if id(parameter) in fired:
        raise UserError(
            f"{why}a backward pass adds to the same gradient several times, as"
            " torch.utils.checkpoint does with use_reentrant=True",
            f"use_reentrant=False, or train.recompute{otherwise}",
            "model",
        )
    if parameter.grad is not None and parameter.grad.is_sparse:
        raise UserError(
            f"{why}a layer gives sparse gradients",
            f"sparse=False (nn.Embedding){otherwise}",
            "model",
        )
    fired.add(id(parameter))
