"""A training state, and the canonical names under which a checkpoint holds it.

model/<parameter>, optimizer/<slot>/<parameter>, optimizer/step, loop/scale, loop/scale_streak: no topology, no engine.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lockstep.core.config import Optimizer
from lockstep.core.protocols import Piece, Saved, share
from lockstep.errors import RunError, UserError
from lockstep.on_torch.precision import Scale

SLOTS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}
_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.int64: "I64"}


@dataclass
class State:
    """model: bare, holding weights and gradients. placed: what a step calls. trained: the parameters with gradients."""

    model: nn.Module
    placed: nn.Module
    trained: list[nn.Parameter]
    optimizer: torch.optim.Optimizer
    scale: Scale


def make_optimizer(fields: Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """Decay on matrices only; fused; its slots exist from the start, so that saving, loading and masking need no first step."""
    groups = [
        {"params": [p for p in model.parameters() if p.requires_grad and p.ndim >= 2], "weight_decay": fields.weight_decay},
        {"params": [p for p in model.parameters() if p.requires_grad and p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    optimizer: torch.optim.Optimizer
    if fields.name == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=fields.lr, betas=fields.betas, eps=fields.eps, fused=True)
    else:
        optimizer = torch.optim.SGD(groups, lr=fields.lr, momentum=fields.momentum, fused=True)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            slots: dict[str, torch.Tensor] = {slot: torch.zeros_like(parameter) for slot in SLOTS[fields.name]}
            if fields.name == "adamw":
                slots["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            optimizer.state[parameter] = slots
    return optimizer


def _tensors(state: State, slots: tuple[str, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    named = dict(state.model.named_parameters())
    for name, parameter in named.items():
        yield f"model/{name}", parameter.detach()
    for name, buffer in state.model.named_buffers():
        if name in state.model.state_dict():
            yield f"model/{name}", buffer
    for name, parameter in named.items():
        for slot in slots:
            if parameter in state.optimizer.state:
                yield f"optimizer/{slot}/{name}", state.optimizer.state[parameter][slot]
    if state.scale.active:
        yield "loop/scale", state.scale.value
        yield "loop/scale_streak", state.scale.streak


def _steps(state: State) -> list[torch.Tensor]:
    return [slots["step"] for slots in state.optimizer.state.values() if "step" in slots]


def gather(state: State, slots: tuple[str, ...], world: int, rank: int) -> list[Piece]:
    """Copies in host memory of the arrays that this rank writes. RunError, on every rank: one of all the arrays is not finite."""
    tensors = dict(_tensors(state, slots))
    if steps := _steps(state):
        tensors["optimizer/step"] = steps[0]
    bad = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
    if bad:
        raise RunError(f"not saved: {_list('not finite any more are', bad).rstrip('; ')}", "--resume RUN with a smaller --lr goes on from its last save")
    mine = share({name: tensor.nbytes for name, tensor in tensors.items()}, world, rank)
    copies = {name: tensors[name].detach().to("cpu", copy=True).contiguous() for name in mine}
    return [Piece(name, _NAMES[copy.dtype], tuple(copy.shape), copy.numpy()) for name, copy in copies.items()]


def restore(state: State, slots: tuple[str, ...], saved: Saved) -> None:
    """Fill a state from a checkpoint, which may have been made at another precision. UserError: names or shapes that don't fit."""
    tensors = dict(_tensors(state, slots))
    optional = {"loop/scale", "loop/scale_streak"}
    missing = [name for name in tensors if name not in saved.arrays and name not in optional]
    extra = [name for name in saved.arrays if name not in tensors and name != "optimizer/step" and name not in optional]
    if missing or extra:
        raise UserError(f"{saved.path} does not fit this model: {_list('missing', missing)}{_list('unknown', extra)}".rstrip("; "), "the same model and optimizer as it was saved with, or another --save-dir", saved.path)
    for name, tensor in tensors.items():
        if name in saved.arrays:
            _fill(name, tensor, saved.arrays, saved.path)
    for step in _steps(state):
        step.fill_(float(saved.arrays["optimizer/step"]))


def _fill(name: str, tensor: torch.Tensor, arrays: Mapping[str, Any], path: str) -> None:
    array = arrays[name]
    if tuple(array.shape) != tuple(tensor.shape):
        raise UserError(f"{name} has shape {tuple(array.shape)} in {path}, {tuple(tensor.shape)} in this model", "the same model as it was saved with", path)
    tensor.copy_(torch.from_numpy(array))


def _list(word: str, names: list[str]) -> str:
    return f"{word} {', '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''}; " if names else ""
