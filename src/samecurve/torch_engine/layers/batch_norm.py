"""Batch normalisation whose statistics are those of all peers' rows together, so that a split over
devices changes nothing.

Dummy rows are left out: they add exactly zero to the statistics and to other peers' gradients.
Equal to one device's nn.BatchNorm on the whole batch, up to rounding, as long as what the peers
hold at once is the whole batch.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from samecurve.errors import UserError
from samecurve.torch_engine.compile_marks import constant, uncompiled


class Peers(Protocol):
    """Who trains together, seen from one of them.

    Every peer calls total equally often, in the same order.
    """

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...

    def all_reduced(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all peers, the same bits for all of them; `values` stay as they are."""
        ...


class Alone:
    """One peer."""

    rank, world_size = 0, 1

    def all_reduced(self, values: torch.Tensor) -> torch.Tensor:
        return values.clone()


class MicroBatchContext:
    """The slot in work on one device: begin() before each forward pass, the next one only after
    backward.

    keys: int64 [rows] on the device (core/determinism/sample_keys.py), None where nothing is keyed.
    real False: a dummy, its results dropped.
    """

    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None
        self.real = True
        self._calls: dict[str, int] = {}

    def begin(self, keys: torch.Tensor | None, real: bool = True) -> None:
        self.keys, self.real = keys, real
        self._calls = {}

    def call_number(self, name: str) -> int:
        """The how-manieth call of `name` in this forward pass, from 0.

        UserError: computed again in backward, and nobody can say which of several calls that is.
        """
        calls = self._calls.get(name, 0)
        if not recomputing():
            self._calls[name] = calls + 1
            return calls
        if calls != 1:
            raise UserError(
                f"{name} is called {calls} times in a forward pass and computed again in backward,"
                " where its calls can't be told apart",
                "a module of its own for each call; or no activation recompute",
                "model",
            )
        return 0


@constant
def recomputing() -> bool:
    """Whether this is a forward pass inside of a backward pass: activation checkpointing computes a
    block again.
    """
    return torch._C._current_graph_task_id() != -1


def coupling_layers(model: nn.Module) -> tuple[str, ...]:
    """What mixes the samples of a batch in training: "BatchNorm2d net.1" for each normalisation
    over the batch, in order.
    """
    return tuple(
        f"{type(module).__name__} {name}".strip()
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm)
    )


def synchronise_batch_norms(model: nn.Module, peers: Peers, context: MicroBatchContext) -> None:
    """Let every BatchNorm of `model` normalise over the real rows of all peers.

    Modules, parameters, buffers and their names stay.

    peers, rows: this replica's own (so call it after copying a model). UserError: a lazy one
    without shapes yet, or one with a forward pass of its own, which would be lost.
    """
    found: list[tuple[str, Any]] = [
        (name, module) for name, module in model.named_modules() if isinstance(module, _BatchNorm)
    ]
    for name, module in found:
        where = f"{type(module).__name__} {name}".strip()
        if isinstance(module, nn.modules.lazy.LazyModuleMixin):
            raise UserError(
                f"{where} has no shape yet, so it can't be synchronised",
                "give its num_features, or run the model once on a batch before it is handed over",
                "model",
            )
        if type(module).forward not in (
            _BatchNorm.forward,
            nn.SyncBatchNorm.forward,
            _Synchronised.forward,
        ):
            raise UserError(
                f"{where} has a forward pass of its own, so it can't be synchronised",
                "nn.BatchNorm and a module after it; or train.allow_coupled: true",
                "model",
            )
        if not isinstance(module, _Synchronised):
            module.__class__ = _synchronised(module.__class__)
        module._place = _Place(where, peers, context)


@dataclass(frozen=True)
class _Place:
    name: str
    peers: Peers
    context: MicroBatchContext

    def __deepcopy__(self, memo: object) -> "_Place":
        """A copied model (an average of weights, say) is in the same place; one for another device
        is given its own by synchronise.
        """
        return self


@cache
def _synchronised(kind: Any) -> Any:
    """A subclass, so that the module stays what it was to everything that asks."""
    return type(f"Synchronised{kind.__name__}", (_Synchronised, kind), {"__module__": __name__})


class _Synchronised(_BatchNorm):
    _place: _Place

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.is_complex():
            raise UserError(
                f"{self._place.name} is given complex numbers, which have no variance of the kind"
                " that it divides by",
                "normalise real and imaginary parts as channels: torch.view_as_real",
                "model",
            )
        if not self.training:
            return _BatchNorm.forward(self, input)
        normalised: torch.Tensor = self._normalised(input)
        return normalised

    @uncompiled
    def _normalised(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        peers, real = self._place.peers, self._place.context.real
        count, mean, variance = _statistics(input, peers, real)
        if self.track_running_stats and not recomputing():
            self._track(count, mean, variance)
        output: torch.Tensor = _Normalise.apply(
            input, self.weight, self.bias, count, mean, variance, self.eps, peers, real
        )  # type: ignore[no-untyped-call]
        return output

    @torch.no_grad()
    def _track(self, count: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """As torch does, but on the device, and what has no value stays: the variance of one value,
        anything without a real row, an overflow (which would stay for good).
        """
        if (
            self.running_mean is None
            or self.running_var is None
            or self.num_batches_tracked is None
        ):
            return
        self.num_batches_tracked += count > 0
        share = (
            1 / self.num_batches_tracked.clamp(min=1) if self.momentum is None else self.momentum
        )
        for kept, found, least in (
            (self.running_mean, mean, 1),
            (self.running_var, variance * (count / (count - 1).clamp(min=1)), 2),
        ):
            moved = kept + (found - kept) * share
            kept.copy_(torch.where((count >= least) & moved.isfinite(), moved, kept))


@torch.no_grad()
def _statistics(
    input: torch.Tensor, peers: Peers, real: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(count, mean [C], biased variance [C]) of all real rows, float64, by one sum of a table that
    holds each peer's own in its row.

    Source: Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample
    variances", 1979.
    """
    channels = input.shape[1]
    table = torch.zeros(
        peers.world_size, 1 + 2 * channels, dtype=torch.float64, device=input.device
    )
    if real:
        table[peers.rank] = torch.cat(_moments(input))
    counts, means, squares = torch.split(peers.all_reduced(table), [1, channels, channels], 1)
    count = counts.sum()
    some = count.clamp(min=1)
    mean = (counts * means).sum(0) / some
    return count, mean, (squares + counts * (means - mean).square()).sum(0) / some


def _moments(input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(count [1], mean [C], sum of squared deviations from it [C]), float64, of one peer: in two
    passes, the second of which corrects the first's mean.
    """
    wide, over = input.to(_wide(input)), _over(input)
    count = torch.full(
        [1], input.numel() // input.shape[1], dtype=torch.float64, device=input.device
    )
    guess = wide.mean(over, keepdim=True)
    centred = wide - guess
    off = centred.sum(over).double() / count
    squares = centred.square_().sum(over).double() - count * off.square()
    return count, guess.flatten().double() + off, squares.clamp(min=0)


class _Normalise(torch.autograd.Function):
    """(input - mean) / sqrt(variance + eps) * weight + bias, where mean and variance depend on all
    peers' inputs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        count: torch.Tensor,
        mean: torch.Tensor,
        variance: torch.Tensor,
        eps: float,
        peers: Peers,
        real: bool,
    ) -> torch.Tensor:
        wide = _wide(input)
        mean, variance = mean.to(wide), variance.to(wide)
        ctx.save_for_backward(input, weight, count, mean, variance)
        ctx.eps, ctx.peers, ctx.real, ctx.bias_dtype = (
            eps,
            peers,
            real,
            None if bias is None else bias.dtype,
        )
        return F.batch_norm(
            input, mean, variance, _as(weight, wide), _as(bias, wide), False, 0.0, eps
        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """With n the input normalised and means over all peers' rows: (gradient - mean(gradient) -
        n * mean(gradient * n)) * weight / deviation.
        """
        input, weight, count, mean, variance = ctx.saved_tensors
        scale, over, shape = (
            (variance + ctx.eps).rsqrt(),
            _over(input),
            [1, -1] + [1] * (input.dim() - 2),
        )
        values, gradient = input.to(mean.dtype), gradient.to(mean.dtype)
        if ctx.real:
            own = torch.stack(
                [gradient.sum(over), (values - mean.view(shape)).mul_(gradient).sum(over) * scale]
            )
        else:
            own = mean.new_zeros(2, len(mean))
        for_input = None
        if ctx.needs_input_grad[0]:
            factor = scale if weight is None else scale * weight.to(mean.dtype)
            shift, slope = (
                ctx.peers.all_reduced(own) / count.clamp(min=1).to(mean.dtype) * -factor
            ).unbind()
            if ctx.real:
                for_input = (
                    F.batch_norm(values, mean, variance, slope, shift, False, 0.0, ctx.eps)
                    .addcmul_(gradient, factor.view(shape))
                    .to(input.dtype)
                )
            else:
                for_input = torch.zeros_like(input)
        for_weight = own[1].to(weight.dtype) if ctx.needs_input_grad[1] else None
        for_bias = own[0].to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return for_input, for_weight, for_bias, None, None, None, None, None, None


def _wide(input: torch.Tensor) -> torch.dtype:
    """What statistics are computed in."""
    return torch.promote_types(input.dtype, torch.float32)


def _over(input: torch.Tensor) -> list[int]:
    """All dimensions but the channels'."""
    return [0, *range(2, input.dim())]


def _as(values: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if values is None else values.to(dtype)
