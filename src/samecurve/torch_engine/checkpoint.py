"""The canonical names under which a checkpoint holds a training state, and both ways between them.

model/<parameter>, ema/<parameter> (its moving average), optimizer/<state>/<parameter>,
optimizer/step (where updates are counted; with /<phase> where a step has several), loop/scale,
loop/scale_streak, loop/late/<parameter> (LATE): no topology, no engine. Complex values are pairs of
real ones there, in a last dimension of 2.

Where what is frozen is a base that comes from elsewhere (a task's frozen_base), its digest stands
in its place: frozen/sha256.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from samecurve.core.protocols import ArrayShard, Checkpoint, arrays_to_write
from samecurve.core.weights import AVERAGE, LATE, check_finite, check_fit, check_weights
from samecurve.torch_engine.optimizers import local_view
from samecurve.torch_engine.step import EngineSetup, State

BASE_DIGEST = "frozen/sha256"  # the digest of a frozen base, among the arrays
_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Entry:
    """A named array of a checkpoint."""

    local: torch.Tensor  # this process's part of it
    shape: tuple[int, ...]  # of the whole
    offsets: tuple[int, ...]  # where the part begins in it
    replica: tuple[int, int]  # (which, of how many) processes hold the same part


def named_entries(
    setup: EngineSetup, state: State, *, everything: bool = False
) -> Iterator[tuple[str, Entry]]:
    """The arrays of a state that a checkpoint holds.

    everything: also a frozen base, and buffers that are not saved
    """
    strategy = setup.strategy

    def entry(tensor: torch.Tensor, local: torch.Tensor) -> Entry:
        shape, offsets = strategy.local_shard(tensor)
        pair = local.ndim - len(shape)  # 1 for a complex array
        replica = strategy.replica_index(tensor)
        return Entry(local, shape + (2,) * pair, offsets + (0,) * pair, replica)

    def along_first(local: torch.Tensor, parameter: torch.Tensor) -> Entry:
        """The entry of a tensor that lies along the first dimension as a parameter does."""
        shape, offsets = strategy.local_shard(parameter)
        rest = tuple(local.shape[1:])
        replica = strategy.replica_index(parameter)
        return Entry(local, (shape[0], *rest), (offsets[0], *[0] * len(rest)), replica)

    for name, tensor in _all_tensors(state) if everything else _tensors_to_save(state):
        yield name, entry(tensor, local_view(tensor))
    if state.average is not None:
        for param, value in zip(state.trained, state.average.values, strict=True):
            yield f"{AVERAGE}{param.name}", entry(param.parameter, value)
    for param in state.trained:
        whole_states = state.optimizer.whole_states(param)
        for state_name, tensor in state.optimizer.state_of(param).items():
            name = f"optimizer/{state_name}/{param.name}"
            is_cut = tensor.ndim and param.parameter.ndim and state_name not in whole_states
            yield name, along_first(tensor, param.parameter) if is_cut else entry(tensor, tensor)
    for name, tensor in _numbers_to_save(state):
        yield name, entry(tensor, tensor)


def _numbers_to_save(state: State) -> Iterator[tuple[str, torch.Tensor]]:
    """The saved numbers that belong to no array of the model, by name."""
    yield from state.numbers.items()
    yield from state.optimizer.shared_state()
    for name, group in state.late.items():
        yield f"{LATE}{name}", torch.tensor(group)


def _all_tensors(state: State) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters and buffers of the model, by name."""
    for name, parameter in state.model.named_parameters():
        yield f"model/{name}", parameter.detach()
    for name, buffer in state.model.named_buffers():
        yield f"model/{name}", buffer


def _tensors_to_save(state: State) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of the model that are saved, by name."""
    saved_names = state.model.state_dict().keys()
    for name, parameter in state.model.named_parameters():
        if parameter.requires_grad or state.base_digest is None:
            yield f"model/{name}", parameter.detach()
    if state.base_digest is not None:
        yield BASE_DIGEST, state.base_digest
    for name, buffer in state.model.named_buffers():
        if name in saved_names:
            yield f"model/{name}", buffer


def _model_entries(setup: EngineSetup, state: State) -> dict[str, Entry]:
    return {name: entry for name, entry in named_entries(setup, state) if name.startswith("model/")}


def gather(setup: EngineSetup, state: State) -> list[ArrayShard]:
    """Copies in host memory of what this process writes.

    RunError, on every rank: one of all the arrays is not finite.
    """
    entries = dict(named_entries(setup, state))
    names = [name for name in entries if name.removeprefix("model/") not in state.unbounded]
    flags = torch.stack([_not_finite(entries[name].local).to(setup.device) for name in names])
    counts = setup.comm.all_reduce(flags)().tolist()
    check_finite([name for name, count in zip(names, counts, strict=True) if count])
    shards = []
    for name in _names_to_write(entries):
        entry = entries[name]
        if entry.local.numel():
            copy = _as_stored(entry.local.to("cpu", copy=True)).contiguous()
            dtype = _DTYPE_NAMES[copy.dtype]
            shards.append(ArrayShard(name, dtype, entry.shape, entry.offsets, copy.numpy()))
    return shards


def _as_stored(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as a file has it: numbers of two bytes or one (a bf16 buffer) in four."""
    narrow = tensor.is_floating_point() and tensor.itemsize < 4
    return tensor.float() if narrow else tensor


def _not_finite(tensor: torch.Tensor) -> torch.Tensor:
    """1 where it holds a value that is not finite, else 0.

    Its extremes say so, in a twentieth of the time that isfinite().all() takes on a CPU.
    """
    if not tensor.numel() or not tensor.is_floating_point():
        return torch.zeros((), dtype=torch.float64)
    low, high = torch.aminmax(tensor)
    return (~(low.isfinite() & high.isfinite())).double()


def _names_to_write(entries: Mapping[str, Entry]) -> list[str]:
    """The names of the arrays that this process writes: those that others hold too are divided
    among them.
    """
    names: list[str] = []
    for replica in sorted({entry.replica for entry in entries.values()}):
        which, of_how_many = replica
        sizes = {
            name: entry.local.nbytes for name, entry in entries.items() if entry.replica == replica
        }
        names += arrays_to_write(sizes, of_how_many, which)
    return names


def digests(setup: EngineSetup, state: State) -> dict[str, str]:
    """The digest of every array of a state; each rank hashes some of them. Of an array that is cut
    into shards it is the digest of the whole.
    """
    from samecurve.core.weights import DIGEST_BYTES, digest

    entries, comm = dict(named_entries(setup, state)), setup.comm
    rows = {name: row for row, name in enumerate(entries)}
    table = np.zeros((len(entries), DIGEST_BYTES), np.uint8)
    for name, whole in _shared_out(setup, entries):
        stored = _as_stored(whole.to("cpu")).numpy()
        table[rows[name]] = np.frombuffer(digest(stored), np.uint8)
    sent = torch.from_numpy(table.view(np.int64)).to(setup.device)
    summed = comm.all_reduce(sent)().cpu().numpy()
    return {name: row.tobytes().hex() for name, row in zip(entries, summed, strict=True)}


def _shared_out(
    setup: EngineSetup, entries: Mapping[str, Entry]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The whole arrays that this process hashes. All processes call it together.

    Those that every process has are divided among all; those that are cut into shards are divided
    among the copies of the model, and within a copy put together by one process each.
    """
    comm = setup.comm
    whole = {name: one for name, one in entries.items() if one.replica[1] == comm.world_size}
    sizes = {name: entry.local.nbytes for name, entry in whole.items()}
    for name in arrays_to_write(sizes, comm.world_size, comm.rank):
        yield name, whole[name].local
    cut = {name: entry for name, entry in entries.items() if name not in whole}
    if cut:
        copy, num_copies = next(iter(cut.values())).replica
        sizes = {name: prod(one.shape) * one.local.itemsize for name, one in cut.items()}
        names = arrays_to_write(sizes, num_copies, copy)
        shards = [(cut[name].local, cut[name].shape) for name in names]
        for number, array in setup.strategy.put_together(shards):
            yield names[number], array


@torch.no_grad()
def restore(setup: EngineSetup, state: State, saved: Checkpoint) -> None:
    """Fill a state from a checkpoint, which may have been made at another precision, strategy or
    world size. UserError: names or shapes that don't fit.
    """
    late = {
        name.removeprefix(LATE): int(saved.arrays[name])
        for name in saved.arrays
        if name.startswith(LATE)
    }
    if late or state.late:
        from samecurve.torch_engine.optimizers.late_params import set_late

        set_late(state, late, state.updates)
    state.step = saved.step
    state.optimizer.create_state()
    entries = dict(named_entries(setup, state))
    shared = {name for name, _ in state.optimizer.shared_state()}
    averages = {name for name in (*entries, *saved.arrays) if name.startswith(AVERAGE)}
    loop = {name for name in (*entries, *saved.arrays) if name.startswith("loop/")}
    numbers = {name for name in loop if not name.startswith(LATE)}
    optional = {"optimizer/step", *shared, *averages, *numbers}
    check_fit(saved, {name: entry.shape for name, entry in entries.items()}, optional)
    if state.base_digest is not None:
        from samecurve.torch_engine.model.frozen_base import check_same_base

        here = state.base_digest.cpu().numpy().tobytes()
        check_same_base(here, saved.arrays[BASE_DIGEST].tobytes(), saved.path)
    _fill({name: entries[name] for name in entries if name not in shared}, saved)
    filled = {name: entry.local for name, entry in entries.items()}
    state.optimizer.after_restore(saved.arrays, filled)
    if state.average is not None and not averages & set(saved.arrays):
        state.average.begin()


@torch.no_grad()
def take_digest(setup: EngineSetup, state: State) -> None:
    """Take the digest of what is frozen now; from here on checkpoints leave that out."""
    from samecurve.torch_engine.model.frozen_base import combined_digest, place_sum

    entries, device = _model_entries(setup, state), setup.device
    frozen = {
        name: entries[f"model/{name}"]
        for name, parameter in state.model.named_parameters()
        if not parameter.requires_grad
    }
    zero = torch.zeros((), dtype=torch.int64, device=device)
    own = [  # of what several hold alike, the first one's
        zero
        if entry.replica[0]
        else place_sum(entry.local.to(device), entry.shape, entry.offsets)  # perhaps in host memory
        for entry in frozen.values()
    ]
    sums = setup.comm.all_reduce(torch.stack(own))().tolist() if own else []
    digest_ = combined_digest({name: entry.shape for name, entry in frozen.items()}, sums)
    state.base_digest = torch.frombuffer(bytearray(digest_), dtype=torch.uint8)


@torch.no_grad()
def load_weights(
    setup: EngineSetup, state: State, weights: Checkpoint, optional: Collection[str] = ()
) -> None:
    """Give a fresh state's model these weights; a buffer that they lack stays as it is.

    optional: names of parameters that may stay too

    UserError: names or shapes that don't fit.
    """
    entries = _model_entries(setup, state)
    check_weights(
        {name: weights.arrays.shape(name) for name in weights.arrays},
        {name: entry.shape for name, entry in entries.items()},
        {f"model/{name}" for name, _ in state.model.named_buffers()}
        | {f"model/{name}" for name in optional},
        weights.path,
    )
    _fill(entries, weights)


def _fill(entries: Mapping[str, Entry], saved: Checkpoint) -> None:
    """Fill the entries that the checkpoint has."""
    for name, entry in entries.items():
        if name in saved.arrays:
            part = saved.arrays.part(name, entry.offsets, tuple(entry.local.shape))
            entry.local.copy_(torch.from_numpy(part))
