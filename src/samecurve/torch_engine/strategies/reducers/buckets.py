"""Buckets: gradients of neighbouring parameters, side by side in one piece of memory, which are
sent together while the last backward pass of a step still runs.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from samecurve.core.strategies import BUCKET_BYTES
from samecurve.errors import NotSameBitsError, UserError
from samecurve.torch_engine.optimizers import local_view

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
            # .data: each view counts its own changes, by which GradientQueue sees a gradient come
            views = [_shaped(flat[at : at + size], one).data for (at, size), one in pairs]
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

    The first step notes in which order gradients come, by a hook on each parameter. From then on
    the parameter of each bucket whose gradient comes last is the only one with a hook. Whether all
    gradients of a pass are there is read from the gradients themselves: torch counts the changes of
    a tensor (its version). A bucket that is not whole when its hook is called is sent at the end of
    the pass, and the next step notes the order anew.

    Where a pass adds to a gradient several times (a reentrant checkpoint), nobody knows when it is
    whole. Along a tree that is refused; else the first step, which sends at the end of its pass,
    shows it, and all steps send there then.

    torch's part in C++ holds hooks, where Python's garbage collector sees no cycle: left in place
    they would keep the whole model in a warm process. So close() removes them.

    buckets: the parameters of each
    send: sends the bucket of this number; all ranks send in the same order
    """

    def __init__(
        self,
        buckets: Sequence[Sequence[nn.Parameter]],
        send: Callable[[int], None] | None = None,
        *,
        in_tree: bool,
    ) -> None:
        self.sends = False  # whether the pass in work is a step's last
        self._buckets, self._send, self._in_tree = buckets, send, in_tree
        self._is_open = False  # a pass of a microbatch is in work; trials have passes of their own
        self._num_sent = 0
        self._before: list[list[int]] = []  # by bucket: versions, as the pass began
        self._after: list[list[int]] = []  # by bucket that was sent: versions then
        # ids of parameters, in the order of the gradients of the pass in work
        self._came: dict[int, None] = {}
        self._ready: set[int] = set()  # buckets whose last gradient has come
        self._was_early = False  # a bucket was not whole when its hook was called
        self._repeats = False  # a pass has added to a gradient several times
        self._hooks: list[RemovableHandle] = []
        self._note_order()

    def begin_step(self) -> None:
        self._num_sent, self._was_early = 0, False
        self._after.clear()

    def begin_pass(self, *, is_last: bool = False) -> None:
        self._is_open = True
        self.sends = is_last and self._send is not None
        self._is_last = is_last
        self._came.clear()
        self._ready.clear()
        self._before = [versions(bucket) for bucket in self._buckets]

    def end_pass(self) -> None:
        """Send what the last pass did not complete, on this rank."""
        self._is_open = False
        for number in range(self._num_sent, len(self._buckets)):
            self._is_whole(number)
        for bucket, sent in zip(self._buckets, self._after, strict=False):
            if versions(bucket) != sent:  # since the bucket was sent
                raise _adds_again(in_tree=self._in_tree)
        if self.sends:
            self.send_rest()
            self.sends = False
        if self._is_last:
            if self._notes_order:
                self._watch_last_ones()
            elif self._was_early:
                self._note_order()

    def send_rest(self) -> None:
        while self._num_sent < len(self._buckets):
            self._send_next()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _is_whole(self, number: int) -> bool:
        """Whether the pass in work has given all gradients of a bucket.

        UserError: a gradient is sparse, or along a tree, the pass has added to it several times.
        """
        parameters, is_whole = self._buckets[number], True
        for parameter, before in zip(parameters, self._before[number], strict=True):
            gradient = parameter.grad
            if gradient is None:
                is_whole = False
                continue
            if gradient.is_sparse:
                raise _is_sparse(in_tree=self._in_tree)
            version = gradient._version  # noqa: SLF001 - counts changes; public nowhere
            is_whole = is_whole and version != before
            if self._in_tree and version > before + 1 > 0:
                raise _adds_again(in_tree=True)
        return is_whole

    def _hook(self, parameter: nn.Parameter, function: Callable[..., None]) -> None:
        register: Any = parameter.register_post_accumulate_grad_hook
        self._hooks.append(register(function))

    def _note_order(self) -> None:
        self.close()
        self._notes_order = True
        for parameter in (one for bucket in self._buckets for one in bucket):
            self._hook(parameter, self._note)

    def _note(self, parameter: nn.Parameter) -> None:
        """Called for each gradient of each pass of the first step."""
        if not self._is_open:
            return
        if id(parameter) in self._came:
            if self._in_tree:
                raise _adds_again(in_tree=True)
            self._repeats = True
        self._came[id(parameter)] = None

    def _watch_last_ones(self) -> None:
        """Leave a hook on one parameter of each bucket, where buckets can be sent early."""
        self.close()
        self._notes_order = False
        if self._send is None or self._repeats:
            return
        places = {key: place for place, key in enumerate(self._came)}
        for number, bucket in enumerate(self._buckets[:-1]):  # the last one ends with the pass
            last = max(bucket, key=lambda parameter: places.get(id(parameter), -1))
            self._hook(last, partial(self._bucket_ready, number))

    def _bucket_ready(self, number: int, _parameter: nn.Parameter) -> None:
        if not (self._is_open and self.sends):
            return
        self._ready.add(number)
        while self._num_sent in self._ready:
            if not self._is_whole(self._num_sent):
                self._was_early = True
                return
            self._send_next()

    def _send_next(self) -> None:
        assert self._send is not None
        number = self._num_sent
        self._send(number)
        self._num_sent += 1
        self._after.append(versions(self._buckets[number]))


def versions(parameters: Sequence[nn.Parameter]) -> list[int]:
    """How often each gradient has changed; -1 where there is none."""
    return [
        -1 if parameter.grad is None else parameter.grad._version  # noqa: SLF001 - as above
        for parameter in parameters
    ]


def note_gradient(fired: set[int], parameter: nn.Parameter, *, in_tree: bool) -> None:
    """Note that a backward pass has given a parameter its gradient.

    fired: ids of the parameters that have one from this pass
    in_tree: whether gradients are added along the step's tree

    UserError: one backward pass adds to the gradient several times, so nobody knows when it is
    whole, nor how it would be added along a tree; or the gradient is sparse.
    """
    if id(parameter) in fired:
        raise _adds_again(in_tree=in_tree)
    if parameter.grad is not None and parameter.grad.is_sparse:
        raise _is_sparse(in_tree=in_tree)
    fired.add(id(parameter))


def _adds_again(*, in_tree: bool) -> UserError:
    kind = NotSameBitsError if in_tree else UserError
    return kind(
        "a backward pass adds to the same gradient several times, as torch.utils.checkpoint does"
        " with use_reentrant=True",
        "use_reentrant=False, or train.recompute",
        "model",
    )


def _is_sparse(*, in_tree: bool) -> UserError:
    kind = NotSameBitsError if in_tree else UserError
    return kind("a layer gives sparse gradients", "sparse=False (nn.Embedding)", "model")
