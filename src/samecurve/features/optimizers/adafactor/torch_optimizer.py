"""Adafactor: of a matrix's second moments only the means of its rows and of its columns are kept.

As torch.optim.Adafactor, whose learning rate bounds the relative step size: a parameter moves by
that share of its own root mean square. Means, that root and the root mean square by which an update
is clipped are those of the whole parameter, wherever its parts are.
Source: Shazeer and Stern, arXiv:1804.04235.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from samecurve.torch_engine.optimizers import (
    ConfigOptimizer,
    Member,
    OptimizerParam,
    grouped,
)
from samecurve.torch_engine.step import EngineSetup

_DECAY_POWER = -0.8  # of the number of updates: the share of the newest squares in the means
_LEAST_SCALE = 1e-3  # of a parameter's root mean square: what is zero must be able to move
_MOST_UPDATE = 1.0  # root mean square of an update, beyond which it is clipped


@dataclass(frozen=True, kw_only=True)
class _Member(Member):
    """A parameter with its state."""

    state: dict[str, torch.Tensor]
    size: int  # numbers of the whole parameter
    rows: int  # of the whole, along the dimension before the last

    @property
    def is_factored(self) -> bool:
        return self.param.view.ndim > 1

    @property
    def cuts_columns(self) -> bool:
        """Whether its shards have parts of each column: they are cut along the first dimension."""
        return self.param.view.ndim == 2


@dataclass(frozen=True)
class _Pace:
    """The factors of a step's update of a parameter; on a GPU they stay there."""

    newest: torch.Tensor  # share of the newest squares in the means
    most: torch.Tensor  # of the relative step size
    is_taken: torch.Tensor  # 1, or 0 where the step is left out


class TorchOptimizer(ConfigOptimizer):
    def __init__(
        self, setup: EngineSetup, trained: Sequence[OptimizerParam], phase: str = ""
    ) -> None:
        super().__init__(setup.optimizer, trained, phase)
        self._strategy = setup.strategy
        self._members = [
            _member(param, lr_scale, weight_decay)
            for (lr_scale, weight_decay), params in grouped(setup.optimizer, trained)
            for param in params
        ]
        self._by_id = {id(member.param): member for member in self._members}

    @torch.no_grad()
    def step(self, lr: float, *, finite: torch.Tensor | bool) -> None:
        if finite is False:
            return
        taken = torch.ones((), dtype=torch.float64, device=self._device)
        if isinstance(finite, torch.Tensor):
            finite = finite.to(self._device)
            taken = taken * finite
            for member in self._members:
                member.gradient.masked_fill_(~finite, 0.0)
        self._num_updates.add_(taken)
        count = self._num_updates.double().clamp(min=1)
        pace = _Pace(count**_DECAY_POWER * taken, count**-0.5, taken)
        params = [member.param for member in self._members]
        sums = self._strategy.sum_over_parts(
            params, [_squares(member, pace) for member in self._members]
        )
        squared_updates = [
            _turn_into_update(member, of_whole, pace)
            for member, of_whole in zip(self._members, sums, strict=True)
        ]
        squared_updates = self._strategy.sum_over_parts(params, squared_updates)
        for member, of_whole, update in zip(self._members, sums, squared_updates, strict=True):
            _move(member, lr, pace, squared_weights=of_whole[0], squared_update=update[0])

    def state_of(self, param: OptimizerParam) -> Mapping[str, torch.Tensor]:
        return self._by_id[id(param)].state

    def whole_states(self, param: OptimizerParam) -> Collection[str]:
        return ("col_var",) if self._by_id[id(param)].cuts_columns else ()


def _member(param: OptimizerParam, lr_scale: float, weight_decay: float) -> _Member:
    view, whole = param.view.detach(), param.parameter  # the whole shape, where it is sharded
    pair = 2 if whole.is_complex() else 1
    state = {"variance": torch.zeros_like(view)}
    rows = 1
    if view.ndim > 1:
        state = {
            "row_var": view.new_zeros(*view.shape[:-1], 1),
            "col_var": view.new_zeros(*view.shape[:-2], 1, view.shape[-1]),
        }
        shape = (*whole.shape, 2) if whole.is_complex() else whole.shape
        rows = shape[-2]
    return _Member(
        param=param,
        state=state,
        lr_scale=lr_scale,
        weight_decay=weight_decay,
        size=whole.numel() * pair,
        rows=rows,
    )


def _squares(member: _Member, pace: _Pace) -> torch.Tensor:
    """This part's sums of squares: of the weights, then, of a matrix, what all rows' means sum up
    to and each column's sum. The rows' means are brought up to date on the way.
    """
    view, gradient = member.param.view, member.gradient
    weights = _squared_norm(view).view(1)
    if not member.is_factored:
        member.state["variance"].lerp_(gradient.square(), pace.newest.to(view.dtype))
        return weights
    of_rows = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True).square_()
    of_rows.div_(gradient.shape[-1])
    rows = member.state["row_var"].lerp_(of_rows, pace.newest.to(view.dtype))
    if not member.cuts_columns:
        return weights
    columns = torch.linalg.vector_norm(gradient, dim=0).double().square()
    return torch.cat([weights, rows.sum(dtype=torch.float64).view(1), columns])


def _turn_into_update(member: _Member, of_whole: torch.Tensor, pace: _Pace) -> torch.Tensor:
    """The gradient becomes the update, not yet clipped; of which this part's sum of squares.

    of_whole: what _squares() gave, of all parts
    """
    gradient, epsilon = member.gradient, torch.finfo(member.param.view.dtype).eps
    if member.is_factored:
        estimate = _estimate(member, of_whole, pace, epsilon)
    else:
        estimate = member.state["variance"].clone()
    gradient.mul_(estimate.clamp_(min=epsilon * epsilon).rsqrt_())
    return _squared_norm(gradient).view(1)


def _estimate(member: _Member, of_whole: torch.Tensor, pace: _Pace, epsilon: float) -> torch.Tensor:
    """Bring the means of rows and columns up to date, and estimate the second moments from them."""
    gradient, rows, columns = member.gradient, member.state["row_var"], member.state["col_var"]
    newest = pace.newest.to(rows.dtype)
    if member.cuts_columns:
        columns.lerp_((of_whole[2:] / member.rows).to(columns.dtype).view(1, -1), newest)
        mean = (of_whole[1] / member.rows).to(rows.dtype)
    else:
        of_columns = torch.linalg.vector_norm(gradient, dim=-2, keepdim=True).square_()
        columns.lerp_(of_columns.div_(member.rows), newest)
        mean = rows.mean(dim=-2, keepdim=True)
    return (rows @ columns).div_(mean.clamp(min=epsilon))


def _move(
    member: _Member,
    lr: float,
    pace: _Pace,
    *,
    squared_weights: torch.Tensor,
    squared_update: torch.Tensor,
) -> None:
    view, rate = member.param.view, lr * member.lr_scale
    weight_scale = (squared_weights / member.size).sqrt().clamp(min=_LEAST_SCALE)
    clipping = ((squared_update / member.size).sqrt() / _MOST_UPDATE).clamp(min=1)
    length = weight_scale * pace.most.clamp(max=rate) / clipping * pace.is_taken
    if member.weight_decay:
        view.mul_((1 - rate * member.weight_decay * pace.is_taken).to(view.dtype))
    view.sub_(member.gradient.mul_(length.to(view.dtype)))


def _squared_norm(tensor: torch.Tensor) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(tensor)
    return norm.double().square()
