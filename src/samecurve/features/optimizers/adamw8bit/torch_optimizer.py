"""AdamW whose moments are kept in eight bits a number, with a scale for each block of a row.

The formula, and the levels that eight bits stand for, are those of torchao's and bitsandbytes'
AdamW8bit; theirs cut blocks out of a shard, so that their curve depends on the number of shards.
Here a block never crosses a row. Small arrays, vectors, and those whose rows have no blocks are
adamw's.
Source: Dettmers et al., "8-bit optimizers via block-wise quantization", arXiv:2110.02861.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from samecurve.core.config.sections import Optimizer
from samecurve.features.optimizers.adamw8bit import block_size
from samecurve.torch_engine.optimizers import (
    ConfigOptimizer,
    Member,
    OptimizerParam,
    grouped,
)
from samecurve.torch_engine.step import EngineSetup

_EXPONENTS = 7  # powers of ten below 1 that levels reach down to
_LEAST_SCALE = 1e-12
_CHUNK = 1 << 22  # numbers that are worked on at once, in the weights' format


class Quantized(NamedTuple):
    """Numbers of a parameter's shape."""

    codes: torch.Tensor  # uint8, of that shape: which level
    scales: torch.Tensor  # float32 [rows, blocks of a row]: what a block's levels are multiplied by
    levels: torch.Tensor  # [256], ascending: what the codes stand for


@dataclass(frozen=True, kw_only=True)
class _Member(Member):
    """A parameter with its moments."""

    first: Quantized
    second: Quantized


class TorchOptimizer(ConfigOptimizer):
    def __init__(
        self, setup: EngineSetup, trained: Sequence[OptimizerParam], phase: str = ""
    ) -> None:
        super().__init__(setup.optimizer, trained, phase)
        signed, positive = levels(signed=True), levels(signed=False)
        self._members = [
            _Member(
                param=param,
                lr_scale=lr_scale,
                weight_decay=weight_decay,
                first=_zeros(param, signed),
                second=_zeros(param, positive),
            )
            for (lr_scale, weight_decay), params in grouped(setup.optimizer, trained)
            for param in params
        ]
        self._by_id = {id(member.param): member for member in self._members}

    @staticmethod
    def chosen(
        _fields: Optimizer, trained: Sequence[OptimizerParam], _hidden: Collection[str]
    ) -> Sequence[OptimizerParam]:
        """The arrays whose rows have blocks."""
        return [param for param in trained if block_size(_whole_shape(param))]

    @torch.no_grad()
    def step(self, lr: float, *, finite: torch.Tensor | bool) -> None:
        if finite is False:
            return
        taken = None
        if isinstance(finite, torch.Tensor):
            taken = finite.to(self._device)
        self._num_updates.add_(1 if taken is None else taken)
        for member in self._members:
            self._update(member, lr * member.lr_scale, taken)

    def _update(self, member: _Member, rate: float, taken: torch.Tensor | None) -> None:
        """taken: whether the step is, where only the device knows; None: it is"""
        view = member.param.view
        weights, gradient = view.reshape(-1), member.gradient.reshape(-1)
        count = self._num_updates.double().clamp(min=1)
        beta1, beta2 = self._fields.betas
        corrections = [(1 - beta**count).to(view.dtype) for beta in (beta1, beta2)]
        for begin in range(0, len(weights), _CHUNK):
            chunk = slice(begin, begin + _CHUNK)
            first = dequantized(member.first, chunk, view.dtype).lerp_(gradient[chunk], 1 - beta1)
            second = dequantized(member.second, chunk, view.dtype)
            second.lerp_(gradient[chunk].square(), 1 - beta2)
            _keep(member.first, chunk, first, taken)
            _keep(member.second, chunk, second, taken)
            step = first.div_(corrections[0])
            step.div_(second.div_(corrections[1]).sqrt_().add_(self._fields.eps))
            moved = (weights[chunk] * (1 - rate * member.weight_decay)).sub_(step, alpha=rate)
            weights[chunk] = moved if taken is None else torch.where(taken, moved, weights[chunk])
        if weights.data_ptr() != view.data_ptr():  # a copy: it does not lie row by row
            view.copy_(weights.view_as(view))

    def state_of(self, param: OptimizerParam) -> Mapping[str, torch.Tensor]:
        member = self._by_id[id(param)]
        return {
            "exp_avg_codes": member.first.codes,
            "exp_avg_scales": member.first.scales,
            "exp_avg_sq_codes": member.second.codes,
            "exp_avg_sq_scales": member.second.scales,
        }


def levels(*, signed: bool) -> torch.Tensor:
    """[256], ascending, from -1 or 0 to 1: the middles of ever more equal parts of each power of
    ten, with 0 and 1.
    """
    parts = [torch.tensor([0.0, 1.0])]
    for exponent in range(_EXPONENTS):
        count = 2**exponent if signed else 2 ** (exponent + 1)
        edges = torch.linspace(0.1, 1.0, count + 1)
        middles = 10.0 ** (exponent + 1 - _EXPONENTS) * (edges[:-1] + edges[1:]) / 2.0
        parts += [middles, -middles] if signed else [middles]
    return torch.cat(parts).sort().values


def dequantized(state: Quantized, chunk: slice, dtype: torch.dtype) -> torch.Tensor:
    """[numbers of the chunk]. chunk: of whole blocks, of the array row by row"""
    codes = state.codes.view(-1)[chunk].int()
    block = state.codes.numel() // max(1, state.scales.numel())
    values = state.levels.to(dtype)[codes].view(-1, block)
    scales = state.scales.view(-1)[chunk.start // block : chunk.stop // block]
    return values.mul_(scales.to(dtype).view(-1, 1)).view(-1)


def quantized(
    values: torch.Tensor, block: int, ascending: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes: the nearest levels, scales: the largest of each block)."""
    blocks = values.view(-1, block)
    scales = blocks.abs().amax(-1).clamp_(min=_LEAST_SCALE).float()
    bounds = ((ascending[:-1] + ascending[1:]) / 2).to(values.dtype)
    scaled = blocks / scales.to(values.dtype).view(-1, 1)
    codes = torch.bucketize(scaled.view(-1), bounds, out_int32=True, right=True)
    return codes.to(torch.uint8), scales


def _keep(state: Quantized, chunk: slice, values: torch.Tensor, taken: torch.Tensor | None) -> None:
    """taken: whether the step is; None: it is"""
    block = state.codes.numel() // state.scales.numel()
    codes, scales = quantized(values, block, state.levels)
    own_codes = state.codes.view(-1)[chunk]
    own_scales = state.scales.view(-1)[chunk.start // block : chunk.stop // block]
    own_codes.copy_(codes if taken is None else torch.where(taken, codes, own_codes))
    own_scales.copy_(scales if taken is None else torch.where(taken, scales, own_scales))


def _whole_shape(param: OptimizerParam) -> tuple[int, ...]:
    pair = (2,) if param.parameter.is_complex() else ()
    return (*param.parameter.shape, *pair)


def _zeros(param: OptimizerParam, ascending: torch.Tensor) -> Quantized:
    view, block = param.view.detach(), block_size(_whole_shape(param))
    assert block
    zero = int((ascending == 0).nonzero())
    blocks_of_row = prod(view.shape[1:]) // block
    return Quantized(
        torch.full(view.shape, zero, dtype=torch.uint8, device=view.device),
        torch.zeros(len(view), blocks_of_row, device=view.device),
        ascending.to(view.device),
    )
