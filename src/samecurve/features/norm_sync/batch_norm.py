"""Batch normalisation over the rows of all peers together, so that a split over devices changes
nothing.

The result equals that of nn.BatchNorm on one device with the whole batch, up to rounding, as long
as the peers together hold the whole batch at once. Dummy rows are left out: they add zero
to the statistics and to the gradients of other peers.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

# torch.compiler.disable, which imports torch._dynamo when the function is first called
from torch._compile import _disable_dynamo
from torch.nn.modules.batchnorm import _BatchNorm

from samecurve.errors import UserError
from samecurve.torch_engine.model import is_coupling
from samecurve.torch_engine.process_group import Peers
from samecurve.torch_engine.randomness import MicroBatchContext, recomputing


def synchronise_batch_norms(model: nn.Module, peers: Peers, context: MicroBatchContext) -> None:
    """Let every BatchNorm of `model` that is in training normalise over the real rows of all peers.

    Modules, parameters, buffers and their names stay.

    peers, context: those of this replica (so call this after a model was copied)

    UserError: a layer is lazy and has no shapes yet, has a forward pass of its own (which would be
    lost), or is in eval mode without running statistics.
    """
    # Any: a module's class and attributes are changed below.
    norms: list[tuple[str, Any]] = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and is_coupling(module)
    ]
    for name, module in norms:
        title = f"{type(module).__name__} {name}".strip()
        if isinstance(module, nn.modules.lazy.LazyModuleMixin):
            raise UserError(
                f"{title} has no shape yet, so it can't be synchronised",
                "give its num_features, or run the model once on a batch before it is handed over",
                "model",
            )
        if not module.training:
            raise UserError(
                f"{title} is in eval mode and has no running statistics, so it normalises by the"
                " microbatch all the same",
                "track_running_stats=True, or leave it in training mode",
                "model",
            )
        if type(module).forward not in (
            _BatchNorm.forward,
            nn.SyncBatchNorm.forward,
            _Synchronised.forward,
        ):
            raise UserError(
                f"{title} has a forward pass of its own, so it can't be synchronised",
                "nn.BatchNorm and a module after it; or train.allow_coupled: true",
                "model",
            )
        if not isinstance(module, _Synchronised):
            module.__class__ = _synchronised(module.__class__)
        module.samecurve_site = _Site(title, peers, context)


@dataclass(frozen=True)
class _Site:
    """The name, the peers and the microbatch of a synchronised module."""

    name: str
    peers: Peers
    context: MicroBatchContext

    def __deepcopy__(self, memo: object) -> "_Site":
        """Return the site itself: a copy of a model (for an average of weights, say) has the same
        peers. synchronise_batch_norms() gives a model for another device a site of its own.
        """
        return self


@cache
def _synchronised(kind: Any) -> Any:
    """The synchronised class for a kind of BatchNorm: a subclass of it, so that isinstance() still
    holds.
    """
    return type(f"Synchronised{kind.__name__}", (_Synchronised, kind), {"__module__": __name__})


class _Synchronised(_BatchNorm):
    samecurve_site: _Site

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        if input.is_complex():
            raise UserError(
                f"{self.samecurve_site.name} is given complex numbers, which have no variance of"
                " the kind that it divides by",
                "normalise real and imaginary parts as channels: torch.view_as_real",
                "model",
            )
        if not self.training:
            return _BatchNorm.forward(self, input)
        normalised: torch.Tensor = self._normalised(input)
        return normalised

    @_disable_dynamo
    def _normalised(self, values: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(values)  # type: ignore[no-untyped-call]
        peers, real = self.samecurve_site.peers, self.samecurve_site.context.real
        statistics = _statistics(values, peers, real=real)
        if self.track_running_stats and not recomputing():
            self._track(statistics)
        output: torch.Tensor = _Normalise.apply(
            values, self.weight, self.bias, *statistics, (self.eps, peers, real)
        )  # type: ignore[no-untyped-call]
        return output

    @torch.no_grad()
    def _track(self, statistics: "_Statistics") -> None:
        """Update the running statistics as torch does, but on the device.

        A statistic keeps its old value where the new one has none: the variance of one value,
        anything without a real row, and an overflow (which would stay for good).
        """
        if (
            self.running_mean is None
            or self.running_var is None
            or self.num_batches_tracked is None
        ):
            return
        count, mean, variance = statistics
        self.num_batches_tracked += count > 0
        momentum: float | torch.Tensor
        if self.momentum is None:
            momentum = 1 / self.num_batches_tracked.clamp(min=1)
        else:
            momentum = self.momentum
        unbiased = variance * (count / (count - 1).clamp(min=1))
        for buffer, current, least in (
            (self.running_mean, mean, 1),
            (self.running_var, unbiased, 2),
        ):
            moved = buffer + (current - buffer) * momentum
            buffer.copy_(torch.where((count >= least) & moved.isfinite(), moved, buffer))


class _Statistics(NamedTuple):
    """Statistics over all peers' real rows, in float64."""

    num_values: torch.Tensor  # of each channel
    mean: torch.Tensor  # [C]
    variance: torch.Tensor  # [C], biased


@torch.no_grad()
def _statistics(values: torch.Tensor, peers: Peers, *, real: bool) -> _Statistics:
    """Statistics over all peers, by one sum of a table with a row for each peer.

    Source: Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample
    variances", 1979.
    """
    channels = values.shape[1]
    table = torch.zeros(
        peers.world_size, 1 + 2 * channels, dtype=torch.float64, device=values.device
    )
    if real:
        table[peers.rank] = torch.cat(_moments(values))
    counts, means, squares = torch.split(peers.all_reduced(table), [1, channels, channels], 1)
    count = counts.sum()
    divisor = count.clamp(min=1)
    mean = (counts * means).sum(0) / divisor
    spread = squares + counts * (means - mean).square()
    return _Statistics(count, mean, spread.sum(0) / divisor)


def _moments(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The moments of one peer's values in float64: count [1], mean [C], and the sum of squared
    deviations from the mean [C]. Computed in two passes; the second one corrects the mean.
    """
    dimensions = _all_but_channels(values)
    wide = values.to(_wide_dtype(values))
    per_channel = values.numel() // values.shape[1]
    count = torch.full([1], per_channel, dtype=torch.float64, device=values.device)
    first_mean = wide.mean(dimensions, keepdim=True)
    centred = wide - first_mean
    error = centred.sum(dimensions).double() / count
    squares = centred.square_().sum(dimensions).double() - count * error.square()
    return count, first_mean.flatten().double() + error, squares.clamp(min=0)


class _Normalise(torch.autograd.Function):
    """The operation (input - mean) / sqrt(variance + eps) * weight + bias, whose mean and variance
    depend on the inputs of all peers.
    """

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd's functions take no keywords
        ctx: Any,
        values: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        count: torch.Tensor,
        mean: torch.Tensor,
        variance: torch.Tensor,
        rest: tuple[float, Peers, bool],
    ) -> torch.Tensor:
        """Normalise. rest: eps, the peers, whether this peer's rows are real"""
        ctx.eps, ctx.peers, ctx.real = rest
        wide = _wide_dtype(values)
        mean, variance = mean.to(wide), variance.to(wide)
        ctx.save_for_backward(values, weight, count, mean, variance)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return F.batch_norm(
            values, mean, variance, _cast(weight, wide), _cast(bias, wide), eps=ctx.eps
        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Compute (gradient - mean(gradient) - n * mean(gradient * n)) * weight / deviation.

        n: the normalised values; the means are over the rows of all peers
        """
        values, weight, count, mean, variance = ctx.saved_tensors
        input_dtype, dimensions = values.dtype, _all_but_channels(values)
        shape = [1, -1] + [1] * (values.dim() - 2)
        scale = (variance + ctx.eps).rsqrt()
        values, gradient = values.to(mean.dtype), gradient.to(mean.dtype)
        if ctx.real:
            centred = (values - mean.view(shape)).mul_(gradient)
            sums = torch.stack([gradient.sum(dimensions), centred.sum(dimensions) * scale])
        else:
            sums = mean.new_zeros(2, len(mean))
        for_values = None
        if ctx.needs_input_grad[0]:
            factor = scale if weight is None else scale * weight.to(mean.dtype)
            means = ctx.peers.all_reduced(sums) / count.clamp(min=1).to(mean.dtype)
            shift, slope = (means * -factor).unbind()
            if ctx.real:
                for_values = (
                    F.batch_norm(values, mean, variance, slope, shift, eps=ctx.eps)
                    .addcmul_(gradient, factor.view(shape))
                    .to(input_dtype)
                )
            else:
                for_values = torch.zeros_like(values, dtype=input_dtype)
        for_weight = sums[1].to(weight.dtype) if ctx.needs_input_grad[1] else None
        for_bias = sums[0].to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return for_values, for_weight, for_bias, None, None, None, None


def _wide_dtype(values: torch.Tensor) -> torch.dtype:
    """The number format in which statistics are computed."""
    return torch.promote_types(values.dtype, torch.float32)


def _all_but_channels(values: torch.Tensor) -> list[int]:
    """The dimensions of a batch that statistics are taken over."""
    return [0, *range(2, values.dim())]


def _cast(values: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if values is None else values.to(dtype)
