"""A training state, and the canonical names under which a checkpoint holds it.

model/<parameter>, optimizer/<slot>/<parameter>, optimizer/step (adamw), loop/scale,
loop/scale_streak: no topology, no engine. Complex values are pairs of real ones there, in a last
dimension of 2.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from samecurve.core.determinism.digest import BYTES, digest
from samecurve.core.protocols import ArrayShard, Checkpoint, arrays_to_write
from samecurve.core.weight_check import check_finite, check_fit, check_weights
from samecurve.torch_engine.optimizer import OptimizerUpdate
from samecurve.torch_engine.optimizer_params import OptimizerParam, local_view
from samecurve.torch_engine.precision import LossScale
from samecurve.torch_engine.process_group import Comm

_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.int64: "I64"}

ShardOf = Callable[[torch.Tensor], tuple[tuple[int, ...], tuple[int, ...]]]
ReplicaOf = Callable[[torch.Tensor], tuple[int, int]]


@dataclass
class State:
    """model: bare, holding weights and gradients of the first device of this process.

    apart: weights that the optimizer sees otherwise than the model. unbounded: buffers that hold
    infinities from the start (a mask).
    """

    model: nn.Module
    trained: list[OptimizerParam]
    optimizer: OptimizerUpdate
    scale: LossScale
    unbounded: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self.parameters = [weight.parameter for weight in self.trained]
        self.viewed_apart = [
            weight for weight in self.trained if weight.view is not weight.parameter
        ]


@dataclass(frozen=True)
class Entry:
    """One named array: this process's part of it, where that lies in the whole, and who else holds
    the same.
    """

    local: torch.Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    replica: tuple[int, int]


def _entries(state: State, shard_of: ShardOf, replica_of: ReplicaOf) -> Iterator[tuple[str, Entry]]:
    def entry(tensor: torch.Tensor, part: torch.Tensor) -> Entry:
        shape, offsets = shard_of(tensor)
        pair = part.ndim - len(shape)  # 1 for a complex array
        return Entry(part, shape + (2,) * pair, offsets + (0,) * pair, replica_of(tensor))

    kept = state.model.state_dict().keys()
    for name, parameter in state.model.named_parameters():
        yield f"model/{name}", entry(parameter, local_view(parameter.detach()))
    for name, buffer in state.model.named_buffers():
        if name in kept:
            yield f"model/{name}", entry(buffer, local_view(buffer))
    for weight in state.trained:
        for slot, tensor in state.optimizer.state_of(weight).items():
            single = not tensor.ndim and weight.view.ndim  # one number for the whole parameter
            yield (
                f"optimizer/{slot}/{weight.name}",
                entry(tensor if single else weight.parameter, tensor),
            )
    extra = (
        {"loop/scale": state.scale.value, "loop/scale_streak": state.scale.streak}
        if state.scale.active
        else {}
    )
    for name, tensor in [*extra.items(), *state.optimizer.shared_state()]:
        yield name, entry(tensor, tensor)


def gather(
    state: State, shard_of: ShardOf, replica_of: ReplicaOf, comm: Comm, device: torch.device
) -> list[ArrayShard]:
    """Copies in host memory of what this process writes.

    RunError, on every rank: one of all the arrays is not finite.
    """
    entries = dict(_entries(state, shard_of, replica_of))
    bad = torch.stack(
        [
            _spoiled(entry.local).to(device)
            for name, entry in entries.items()
            if name.removeprefix("model/") not in state.unbounded
        ]
    )
    checked = [name for name in entries if name.removeprefix("model/") not in state.unbounded]
    names = [
        name for name, count in zip(checked, comm.all_reduce(bad)().tolist(), strict=True) if count
    ]
    check_finite(names)
    mine: list[str] = []
    for which, many in sorted({entry.replica for entry in entries.values()}):
        mine += arrays_to_write(
            {
                name: entry.local.nbytes
                for name, entry in entries.items()
                if entry.replica == (which, many)
            },
            many,
            which,
        )
    pieces = []
    for name in mine:
        entry = entries[name]
        if entry.local.numel():
            copy = entry.local.to("cpu", copy=True).contiguous()
            pieces.append(
                ArrayShard(name, _NAMES[copy.dtype], entry.shape, entry.offsets, copy.numpy())
            )
    return pieces


def _spoiled(part: torch.Tensor) -> torch.Tensor:
    """1 where it holds a value that is not finite, else 0.

    Its extremes say so, in a twentieth of the time that isfinite().all() takes on a CPU.
    """
    if not part.numel():
        return torch.zeros((), dtype=torch.float64)
    low, high = torch.aminmax(part)
    return (~(low.isfinite() & high.isfinite())).double()


def digests(
    state: State, shard_of: ShardOf, replica_of: ReplicaOf, comm: Comm, device: torch.device
) -> dict[str, str]:
    """Of every array of a state that all ranks hold whole; each rank hashes some of them."""
    entries = dict(_entries(state, shard_of, replica_of))
    mine = set(
        arrays_to_write(
            {name: entry.local.nbytes for name, entry in entries.items()},
            comm.world_size,
            comm.rank,
        )
    )
    found = np.zeros((len(entries), BYTES), np.uint8)
    for row, (name, entry) in enumerate(entries.items()):
        if name in mine:
            found[row] = np.frombuffer(digest(entry.local.to("cpu").numpy()), np.uint8)
    summed = comm.all_reduce(torch.from_numpy(found.view(np.int64)).to(device))().cpu().numpy()
    return {name: row.tobytes().hex() for name, row in zip(entries, summed, strict=True)}


@torch.no_grad()
def restore(state: State, shard_of: ShardOf, replica_of: ReplicaOf, saved: Checkpoint) -> None:
    """Fill a state from a checkpoint, which may have been made at another precision, strategy or
    world. UserError: names or shapes that don't fit.
    """
    state.optimizer.create_state()
    entries = dict(_entries(state, shard_of, replica_of))
    optional = {"loop/scale", "loop/scale_streak", "optimizer/step"}
    check_fit(saved, {name: entry.shape for name, entry in entries.items()}, optional)
    for name, entry in entries.items():
        if name in saved.arrays and name != "optimizer/step":
            entry.local.copy_(
                torch.from_numpy(saved.arrays.part(name, entry.offsets, tuple(entry.local.shape)))
            )
    state.optimizer.after_restore(
        saved.arrays, {name: entry.local for name, entry in entries.items()}
    )


@torch.no_grad()
def load_weights(
    state: State, shard_of: ShardOf, replica_of: ReplicaOf, weights: Checkpoint
) -> None:
    """Give a fresh state's model these weights; a buffer that they lack stays as it is.

    UserError: names or shapes that don't fit.
    """
    entries = {
        name: entry
        for name, entry in _entries(state, shard_of, replica_of)
        if name.startswith("model/")
    }
    buffers = {f"model/{name}" for name, _ in state.model.named_buffers()}
    check_weights(
        {name: weights.arrays.shape(name) for name in weights.arrays},
        {name: entry.shape for name, entry in entries.items()},
        buffers,
        weights.path,
    )
    for name, entry in entries.items():
        if name in weights.arrays:
            entry.local.copy_(
                torch.from_numpy(weights.arrays.part(name, entry.offsets, tuple(entry.local.shape)))
            )
