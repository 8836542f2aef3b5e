"""Muon: the momentum of a hidden layer's matrix, made nearly orthogonal, is its update; everything
else is adamw's.

As torch.optim.Muon with adjust_lr_fn="match_rms_adamw", so that one learning rate and one weight
decay serve both. Each update is computed of a whole matrix, by one of the processes that have it
or parts of it. A stack of matrices [number, rows, columns] is cut between its matrices, so a shard
has whole ones. Products are taken in the weights' own format, under bf16 and f16 in bfloat16.
Sources: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; Liu et
al., "Muon is scalable for LLM training", arXiv:2502.16982.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from samecurve.core.config.sections import Optimizer
from samecurve.features.optimizers.muon import muon_names
from samecurve.torch_engine.optimizers import (
    ConfigOptimizer,
    Member,
    OptimizerParam,
    grouped,
    is_sharded,
)
from samecurve.torch_engine.step import EngineSetup

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the polynomial that moves singular values to 1
_NUM_ITERATIONS = 5
_LEAST_NORM = 1e-7
_ADAMW_RMS = 0.2  # root mean square of adamw's updates, which muon's are to have


@dataclass(frozen=True, kw_only=True)
class _Member(Member):
    """A matrix with its momentum."""

    momentum: torch.Tensor

    @property
    def has_whole_matrices(self) -> bool:
        """Whether this process's part of it is a number of whole ones."""
        return self.param.view.ndim == 3 and is_sharded(self.param.parameter)


class TorchOptimizer(ConfigOptimizer):
    is_counted = False

    def __init__(
        self, setup: EngineSetup, trained: Sequence[OptimizerParam], phase: str = ""
    ) -> None:
        super().__init__(setup.optimizer, trained, phase)
        self._strategy = setup.strategy
        dtype = torch.bfloat16 if setup.plan.compute.precision in {"bf16", "f16"} else None
        self._function: Callable[[torch.Tensor], torch.Tensor] = partial(orthogonal, dtype=dtype)
        if setup.plan.compute.deterministic:
            self._function = partial(_one_by_one, self._function)
        self._members = [
            _Member(
                param=param,
                lr_scale=lr_scale,
                weight_decay=weight_decay,
                momentum=torch.zeros_like(param.view, requires_grad=False),
            )
            for (lr_scale, weight_decay), params in grouped(setup.optimizer, trained)
            for param in params
        ]
        self._states = {id(member.param): member.momentum for member in self._members}

    @staticmethod
    def chosen(
        fields: Optimizer, trained: Sequence[OptimizerParam], hidden: Collection[str]
    ) -> Sequence[OptimizerParam]:
        """The matrices of hidden layers, unless a group of the config says otherwise."""
        shapes = {param.name: tuple(param.parameter.shape) for param in trained}
        matrices = muon_names(fields.rules, shapes, hidden)
        return [param for param in trained if param.name in matrices]

    @torch.no_grad()
    def step(self, lr: float, *, finite: torch.Tensor | bool) -> None:
        if finite is False:
            return
        taken: float | torch.Tensor = 1.0
        if isinstance(finite, torch.Tensor):
            finite = finite.to(self._device)
            taken = finite.double()
            for member in self._members:
                member.gradient.masked_fill_(~finite, 0.0)
        for member in self._members:
            _add_momentum(member, self._fields.momentum, taken)
        shared = [member for member in self._members if not member.has_whole_matrices]
        updates = self._strategy.map_whole(
            [member.param for member in shared],
            [member.gradient for member in shared],
            self._function,
        )
        for number, update in updates:
            _move(shared[number], update, lr, taken)
        for member in self._members:
            if member.has_whole_matrices:
                _move(member, self._function(member.gradient), lr, taken)

    def state_of(self, param: OptimizerParam) -> Mapping[str, torch.Tensor]:
        return {"momentum_buffer": self._states[id(param)]}


def _one_by_one(
    function: Callable[[torch.Tensor], torch.Tensor], matrices: torch.Tensor
) -> torch.Tensor:
    """function(matrix), of a stack for each matrix by itself, however many a shard has of it."""
    if matrices.ndim == 2:
        return function(matrices)
    results = torch.empty_like(matrices)
    for result, matrix in zip(results, matrices, strict=True):
        result.copy_(function(matrix.clone()))  # a copy is aligned, for kernels that add in vectors
    return results


def _add_momentum(member: _Member, decay: float, taken: float | torch.Tensor) -> None:
    """The gradient becomes what is to be made orthogonal: Nesterov's look ahead."""
    newest = (1 - decay) * taken
    if isinstance(newest, torch.Tensor):
        newest = newest.to(member.momentum.dtype)
    member.momentum.lerp_(member.gradient, newest)
    member.gradient.lerp_(member.momentum, decay)


def _move(member: _Member, update: torch.Tensor, lr: float, taken: float | torch.Tensor) -> None:
    """update: this process's part of the orthogonal one"""
    view, rate = member.param.view, lr * member.lr_scale
    view.mul_(1 - rate * member.weight_decay * taken)
    scale = _ADAMW_RMS * max(member.param.parameter.shape[-2:]) ** 0.5
    view.sub_(update.mul_(rate * scale * taken))


def orthogonal(matrix: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """[..., m, n], with all singular values moved to about 1 by a Newton-Schulz iteration.

    dtype: of the products; None: the matrix's own
    """
    x = matrix.to(dtype or matrix.dtype, copy=True)
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=_LEAST_NORM)
    a, b, c = _COEFFICIENTS
    add_product = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(_NUM_ITERATIONS):
        gram = x @ x.mT
        polynomial = add_product(gram, gram, gram, beta=b, alpha=c)
        x = add_product(x, polynomial, x, beta=a)
    return (x.mT if is_tall else x).to(matrix.dtype)
