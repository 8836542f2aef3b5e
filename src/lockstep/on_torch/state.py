"""A training state, and the canonical names under which a checkpoint holds it.

model/<parameter>, optimizer/<slot>/<parameter>, optimizer/step, loop/scale, loop/scale_streak: no topology, no engine.
Complex values are pairs of real ones there, in a last dimension of 2.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lockstep.core.config import Optimizer
from lockstep.core.digest import BYTES, digest
from lockstep.core.fit import check_finite, check_fit, check_weights
from lockstep.core.protocols import Piece, Saved, share
from lockstep.on_torch.collectives import Ranks
from lockstep.on_torch.precision import Scale

SLOTS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}
_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.int64: "I64"}

Box = Callable[[torch.Tensor], tuple[tuple[int, ...], tuple[int, ...]]]
Holders = Callable[[torch.Tensor], tuple[int, int]]


@dataclass
class Weight:
    """A trained parameter and the real, local values of it that the optimizer sees: the parameter itself, unless it is complex or shared out."""

    name: str
    parameter: nn.Parameter
    seen: nn.Parameter

    def follow(self) -> None:
        """Let the optimizer see this step's gradient (and the values, which a strategy may have moved)."""
        if self.seen is not self.parameter:
            self.seen.data = local(self.parameter.detach())
            self.seen.grad = None if self.parameter.grad is None else local(self.parameter.grad)


@dataclass
class State:
    """model: bare, holding weights and gradients of the first device of this process. unbounded: buffers that hold infinities from the start (a mask)."""

    model: nn.Module
    trained: list[Weight]
    optimizer: torch.optim.Optimizer
    scale: Scale
    unbounded: frozenset[str] = frozenset()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor, complex values as pairs of real ones; no copy."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return torch.view_as_real(part) if part.is_complex() else part


def weights(model: nn.Module) -> list[Weight]:
    found = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            direct = not isinstance(parameter, DTensor) and not parameter.is_complex()
            found.append(Weight(name, parameter, parameter if direct else nn.Parameter(local(parameter.detach()))))
    return found


def make_optimizer(fields: Optimizer, trained: list[Weight]) -> torch.optim.Optimizer:
    """Decay on matrices only; fused; its slots exist from the start, so that saving, loading and masking need no first step."""
    groups = [
        {"params": [w.seen for w in trained if w.parameter.ndim >= 2], "weight_decay": fields.weight_decay},
        {"params": [w.seen for w in trained if w.parameter.ndim < 2], "weight_decay": 0.0},
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


@dataclass(frozen=True)
class Entry:
    """One named array: this process's part of it, where that lies in the whole, and who else holds the same."""

    part: torch.Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    holder: tuple[int, int]


def _entries(state: State, slots: tuple[str, ...], box: Box, holders: Holders) -> Iterator[tuple[str, Entry]]:
    def entry(tensor: torch.Tensor, part: torch.Tensor) -> Entry:
        shape, offsets = box(tensor)
        pair = part.ndim - len(shape)  # 1 for a complex array
        return Entry(part, shape + (2,) * pair, offsets + (0,) * pair, holders(tensor))

    kept = state.model.state_dict().keys()
    for name, parameter in state.model.named_parameters():
        yield f"model/{name}", entry(parameter, local(parameter.detach()))
    for name, buffer in state.model.named_buffers():
        if name in kept:
            yield f"model/{name}", entry(buffer, local(buffer))
    for weight in state.trained:
        for slot in slots:
            yield f"optimizer/{slot}/{weight.name}", entry(weight.parameter, state.optimizer.state[weight.seen][slot])
    extra = {"loop/scale": state.scale.value, "loop/scale_streak": state.scale.streak} if state.scale.active else {}
    if steps := _steps(state):
        extra["optimizer/step"] = steps[0]
    for name, tensor in extra.items():
        yield name, entry(tensor, tensor)


def _steps(state: State) -> list[torch.Tensor]:
    return [slots["step"] for slots in state.optimizer.state.values() if "step" in slots]


def gather(state: State, slots: tuple[str, ...], box: Box, holders: Holders, ranks: Ranks, device: torch.device) -> list[Piece]:
    """Copies in host memory of what this process writes. RunError, on every rank: one of all the arrays is not finite."""
    entries = dict(_entries(state, slots, box, holders))
    bad = torch.stack([(~entry.part.isfinite()).any().double().to(device) for name, entry in entries.items() if name.removeprefix("model/") not in state.unbounded])
    checked = [name for name in entries if name.removeprefix("model/") not in state.unbounded]
    names = [name for name, count in zip(checked, ranks.sum(bad)().tolist(), strict=True) if count]
    check_finite(names)
    mine: list[str] = []
    for which, many in sorted({entry.holder for entry in entries.values()}):
        mine += share({name: entry.part.nbytes for name, entry in entries.items() if entry.holder == (which, many)}, many, which)
    pieces = []
    for name in mine:
        entry = entries[name]
        if entry.part.numel():
            copy = entry.part.to("cpu", copy=True).contiguous()
            pieces.append(Piece(name, _NAMES[copy.dtype], entry.shape, entry.offsets, copy.numpy()))
    return pieces


def digests(state: State, slots: tuple[str, ...], box: Box, holders: Holders, ranks: Ranks, device: torch.device) -> dict[str, str]:
    """Of every array of a state that all ranks hold whole; each rank hashes some of them."""
    entries = dict(_entries(state, slots, box, holders))
    mine = set(share({name: entry.part.nbytes for name, entry in entries.items()}, ranks.world, ranks.index))
    found = np.zeros((len(entries), BYTES), np.uint8)
    for row, (name, entry) in enumerate(entries.items()):
        if name in mine:
            found[row] = np.frombuffer(digest(entry.part.to("cpu").numpy()), np.uint8)
    summed = ranks.sum(torch.from_numpy(found.view(np.int64)).to(device))().cpu().numpy()
    return {name: row.tobytes().hex() for name, row in zip(entries, summed, strict=True)}


@torch.no_grad()
def restore(state: State, slots: tuple[str, ...], box: Box, holders: Holders, saved: Saved) -> None:
    """Fill a state from a checkpoint, which may have been made at another precision, strategy or world. UserError: names or shapes that don't fit."""
    entries = dict(_entries(state, slots, box, holders))
    optional = {"loop/scale", "loop/scale_streak", "optimizer/step"}
    check_fit(saved, {name: entry.shape for name, entry in entries.items()}, optional)
    for name, entry in entries.items():
        if name in saved.arrays and name != "optimizer/step":
            entry.part.copy_(torch.from_numpy(saved.arrays.part(name, entry.offsets, tuple(entry.part.shape))))
    for step in _steps(state):
        step.fill_(float(saved.arrays["optimizer/step"]))


@torch.no_grad()
def fill(state: State, box: Box, holders: Holders, weights: Saved) -> None:
    """Give a fresh state's model these weights; a buffer that they lack stays as it is. UserError: names or shapes that don't fit."""
    entries = {name: entry for name, entry in _entries(state, (), box, holders) if name.startswith("model/")}
    buffers = {f"model/{name}" for name, _ in state.model.named_buffers()}
    check_weights({name: weights.arrays.shape(name) for name in weights.arrays}, {name: entry.shape for name, entry in entries.items()}, buffers, weights.path)
    for name, entry in entries.items():
        if name in weights.arrays:
            entry.part.copy_(torch.from_numpy(weights.arrays.part(name, entry.offsets, tuple(entry.part.shape))))
