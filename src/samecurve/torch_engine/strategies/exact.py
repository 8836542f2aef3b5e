"""train.exact: each slot's gradient by itself, added along the step's tree
(core/determinism/microbatches.py), so that the sum has the same bits whatever devices computed it.

Every other slot's gradient is added by autograd itself to its left neighbour's, so accumulation
costs what it always does. Several processes exchange what they have bucket by bucket, while the
last backward pass still runs (exchange.py).
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from samecurve.core.determinism.microbatches import Node, TreeSum
from samecurve.core.protocols import MicroBatch
from samecurve.errors import UserError
from samecurve.torch_engine.strategies.exact_allreduce import ExactAllReduce, Gradients
from samecurve.torch_engine.strategies.replicated import DP
from samecurve.units import first_and_count

_BUCKET = 8 << 20  # bytes


def set_deterministic(exact: bool) -> None:
    """Kernels that give the same bits each time, or again whichever are fastest.

    What has no such form says so when it runs.
    """
    torch.use_deterministic_algorithms(exact)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = exact
    torch.backends.cuda.enable_cudnn_sdp(not exact)  # its backward has no deterministic form


class SideEffectCheck:
    """What a forward pass must leave as it is: a slot's result would else depend on which slots
    this device computed before.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._device = model, device
        self._numbers, self._buffers = self._drawn(), self._versions()

    def check(self) -> None:
        """UserError: numbers were drawn, or buffers changed."""
        if self._drawn() != self._numbers:
            raise UserError(
                "train.exact: the loss draws random numbers, which follow the device",
                "numbers that follow from the sample (its data can hold some), nn.Dropout, or leave"
                " --exact out",
                "task",
            )
        changed = [
            name for name, version in self._versions().items() if self._buffers.get(name) != version
        ]
        if changed:
            raise UserError(
                f"train.exact: the forward pass changes buffer {first_and_count(changed)}, which then follows"
                " the device",
                "a buffer that stays as it is in training, or leave --exact out",
                "model",
            )

    def _drawn(self) -> tuple[Any, ...]:
        """What changes with every random number: torch's on the host and this device, numpy's,
        Python's own.
        """
        here = (
            torch.cuda.get_rng_state(self._device).numpy().tobytes()
            if self._device.type == "cuda"
            else b""
        )
        numpy = np.random.get_state(legacy=False)
        return torch.get_rng_state().numpy().tobytes(), here, str(numpy), random.getstate()

    def _versions(self) -> dict[str, tuple[int, int]]:
        return {name: (id(buffer), buffer._version) for name, buffer in self._model.named_buffers()}


class Exact(DP):
    """single, dp and ddp in one: a bare replica for each device of this process."""

    def distribute(self, models: list[nn.Module], fill: Callable[[nn.Module], None]) -> None:
        super().distribute(models, fill)
        self._parameters = [
            [parameter for parameter in model.parameters() if parameter.requires_grad]
            for model in self.models
        ]
        self._cuts = _cuts(self._parameters[0]) if self._comm.group else [slice(None)]
        self._exchange = (
            ExactAllReduce(
                [self._parameters[0][cut] for cut in self._cuts],
                self._comm,
                self._plan.backend,
                self._plan.microbatches_of,
            )
            if self._comm.group
            else None
        )
        self._names = [
            name for name, parameter in self.models[0].named_parameters() if parameter.requires_grad
        ]
        self._after: Callable[[nn.Parameter], None] | None = (
            None  # what the last slot does with a gradient as soon as it is there
        )
        self._fired: list[set[int]] = [set() for _ in self.models]
        for own, fired in zip(self._parameters, self._fired, strict=True):
            for parameter in own:
                parameter.register_post_accumulate_grad_hook(partial(self._ready, fired))  # type: ignore[no-untyped-call]

    def begin_step(self, parameters: Sequence[nn.Parameter], count: int) -> None:
        self._count = count
        self._sums = [[TreeSum[Gradients](count, _added) for _ in self._cuts] for _ in self.models]
        self._sent = 0  # buckets on their way
        self._reached: set[str] = set()
        for own in self._parameters:
            _clear(own)

    @contextmanager
    def accumulation_round(self, index: int, slot: MicroBatch, last: bool) -> Iterator[None]:
        sums, number = self._sums[index], slot.number
        left = [one.take((0, number - 1)) for one in sums] if number % 2 else [None]
        paired = left[0] is not None  # in every bucket, or in none
        node = (1, number // 2) if paired else (0, number)
        if not paired:
            _clear(self._parameters[index])
        self._after = self._sender(node) if last and self._exchange else None
        self._fired[index].clear()
        yield
        self._after = None
        for bucket in range(self._sent, len(self._cuts)):
            self._give(index, bucket, node)

    def _give(self, index: int, bucket: int, node: Node) -> None:
        self._sums[index][bucket].give(
            node, [parameter.grad for parameter in self._parameters[index][self._cuts[bucket]]]
        )

    def _sender(self, node: Node) -> Callable[[nn.Parameter], None]:
        """Sends each bucket, in their order, as soon as the last slot's gradients of it are there."""
        bucket_of = {
            id(parameter): number
            for number, cut in enumerate(self._cuts)
            for parameter in self._parameters[0][cut]
        }
        missing = [len(self._parameters[0][cut]) for cut in self._cuts]

        def ready(parameter: nn.Parameter) -> None:
            missing[bucket_of[id(parameter)]] -= 1
            while self._sent < len(missing) and not missing[self._sent]:
                self._give(0, self._sent, node)
                self._send()

        return ready

    def _ready(self, fired: set[int], parameter: torch.Tensor) -> None:
        """UserError: one backward pass adds to a gradient twice, so that it is no single number to
        add along the tree.
        """
        if id(parameter) in fired:
            raise UserError(
                "train.exact: a backward pass adds to the same gradient several times, as"
                " torch.utils.checkpoint does with use_reentrant=True",
                "use_reentrant=False, or train.recompute, or leave --exact out",
                "model",
            )
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise UserError(
                "train.exact: a layer gives sparse gradients",
                "sparse=False (nn.Embedding), or leave --exact out",
                "model",
            )
        fired.add(id(parameter))
        if self._after:
            self._after(parameter)  # type: ignore[arg-type]

    def _send(self) -> None:
        """The next bucket; what it was made of is let go of."""
        assert self._exchange is not None
        cut, held = self._cuts[self._sent], self._sums[0][self._sent].held
        self._note(cut, held)
        self._exchange.send(self._sent, held, self._count)
        held.clear()
        _clear(self._parameters[0][cut])
        self._sent += 1

    def _note(self, cut: slice, held: Sequence[tuple[Node, Gradients]]) -> None:
        self._reached |= {
            name
            for _, gradients in held
            for name, gradient in zip(self._names[cut], gradients, strict=True)
            if gradient is not None
        }

    def params_with_grad(self) -> set[str]:
        return self._reached

    def reduce(self, parameters: Sequence[nn.Parameter]) -> None:
        if self._exchange:
            while self._sent < len(self._cuts):
                self._send()
            self._exchange.finish()
            return
        total: TreeSum[Gradients] = TreeSum(self._count, _added)
        device = self._devices[0]
        for sums in self._sums:
            self._note(slice(None), sums[0].held)
            for node, held in sums[0].held:
                total.give(
                    node,
                    [gradient if gradient is None else gradient.to(device) for gradient in held],
                )
        self._sums = []
        for others in self._parameters[1:]:
            _clear(others)
        for parameter, gradient in zip(parameters, total.total(), strict=True):
            parameter.grad = _laid_out(gradient, parameter)


def _added(left: Gradients, right: Gradients) -> Gradients:
    both = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if both:
        torch._foreach_add_([a for a, _ in both], [b for _, b in both])
    return [b if a is None else a for a, b in zip(left, right, strict=True)]


def _clear(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


def _laid_out(gradient: torch.Tensor | None, parameter: nn.Parameter) -> torch.Tensor:
    """As the exchange leaves it: in memory like the parameter, whatever form autograd gave it;
    zeros where no slot used the parameter.
    """
    if gradient is None:
        return torch.zeros_like(parameter)
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


def _cuts(parameters: Sequence[nn.Parameter]) -> list[slice]:
    """Neighbours, some megabytes together, the last ones first: their gradients are there first."""
    cuts, last, size = [], len(parameters), 0
    for number in reversed(range(len(parameters))):
        size += parameters[number].nbytes
        if size >= _BUCKET or number == 0:
            cuts.append(slice(number, last))
            last, size = number, 0
    return cuts
