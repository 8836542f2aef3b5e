"""train.check_replicas: compares the bits of what several ranks, or devices of one process, hold
alike: parameters, frozen ones too, buffers, the moving average and the optimizer's state.

Each array is hashed on its device: its bits, as integers, are multiplied by odd factors that follow
from their places, and added up modulo 2^64. So 8 bytes an array leave a device, and all ranks add
up one small table. A step between two comparisons has no part in it.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import nn

from samecurve.core.replica_check import ReplicaHashes, check_alike
from samecurve.torch_engine.checkpoint import Entry, named_entries
from samecurve.torch_engine.optimizers.optimizer import local_view
from samecurve.torch_engine.step.setup import EngineSetup, State

_CHUNK = {"cpu": 1 << 16}  # numbers that are hashed at once: on a CPU they stay in its cache
_LARGE_CHUNK = 1 << 22
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
_FIRST = 0x9E3779B97F4A7C15 - (1 << 64)  # odd factors of 64 bits, as signed numbers
_SECOND = 0xBF58476D1CE4E5B9 - (1 << 64)
Parts = Mapping[str, tuple[torch.Tensor, int]]  # by name: values, and where in the array they begin


@torch.no_grad()
def compare_replicas(
    setup: EngineSetup, state: State, step: int, left_out: Collection[str] = ()
) -> int:
    """Compare after a step, on all ranks. Returns the number of arrays that were compared.

    step: how many are done
    left_out: names of buffers of the model that each rank has for itself

    RunError, on every rank: an array differs.
    """
    if setup.has_several_devices:
        holders = [dict(_arrays_of(model, left_out)) for model in setup.strategy.models]
    else:
        entries = named_entries(setup, state, everything=True)
        outside = {f"model/{name}" for name in left_out}
        holders = [
            {
                name: (entry.local, _place(entry))
                for name, entry in entries
                if entry.replica[1] > 1 and name not in outside
            }
        ]
    return _compare(setup, holders, step)


class CompareBeforeUpdate:
    """The hook of a step whose process has several devices: it compares their parameters before the
    gradients are added up. The update will give all of them the first one's parameters again.
    """

    def __init__(self, setup: EngineSetup, state: State) -> None:
        self._setup, self._done = setup, state.step

    @torch.no_grad()
    def __call__(self, _num_microbatches: int) -> None:
        """RunError: a parameter differs."""
        self._done += 1
        if self._done % self._setup.plan.every.check_replicas == 0:
            replicas = self._setup.strategy.models
            holders = [dict(_arrays_of(model, buffers=False)) for model in replicas]
            _compare(self._setup, holders, self._done)


def _arrays_of(
    model: nn.Module, left_out: Collection[str] = (), *, buffers: bool = True
) -> Iterator[tuple[str, tuple[torch.Tensor, int]]]:
    """The arrays of a model that is whole on one device."""
    for name, parameter in model.named_parameters():
        yield f"model/{name}", (local_view(parameter.detach()), 0)
    for name, buffer in model.named_buffers() if buffers else ():
        if name not in left_out:
            yield f"model/{name}", (local_view(buffer), 0)


def _place(entry: Entry) -> int:
    """Where the part of an array begins, as the number of its first value."""
    place = 0
    for offset, size in zip(entry.offsets, entry.shape, strict=True):
        place = place * size + offset
    return place


def _compare(setup: EngineSetup, holders: Sequence[Parts], step: int) -> int:
    """Compare what the devices of this process, and of all others, hold.

    holders: for each device of this process, the parts that it holds, in one order
    """
    names, bit_sums = list(holders[0]), BitSums()
    if not names:
        return 0
    device, comm = setup.device, setup.comm
    table = torch.zeros(
        (comm.world_size, len(holders), len(names), 2), dtype=torch.int64, device=device
    )
    for row, parts in zip(table[comm.rank], holders, strict=True):
        row[:, 0] = torch.stack([bit_sums.of(values).to(device) for values, _ in parts.values()])
        row[:, 1] = torch.tensor([place for _, place in parts.values()])
    hashes, places = comm.all_reduce(table)().flatten(0, 1).cpu().unbind(-1)
    check_alike(ReplicaHashes(names, hashes.numpy(), places.numpy()), setup.plan, step)
    return len(names)


class BitSums:
    """Hashes of arrays' bits. Keeps the factors, which are the same for all arrays of a device."""

    def __init__(self) -> None:
        self._factors: dict[torch.device, torch.Tensor] = {}

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """The hash of an array; int64, on its device. It differs if a single number differs."""
        device = values.device
        chunk = _CHUNK.get(device.type, _LARGE_CHUNK)
        flat = values.detach().reshape(-1)
        bits = flat.view(_INTEGERS[flat.element_size()])
        factors = self._factors_of(min(len(bits), chunk), device)
        total = torch.zeros((), dtype=torch.int64, device=device)
        for part in torch.split(bits, chunk):
            total = total * _FIRST + (part * factors[: len(part)]).sum()
        return total

    def _factors_of(self, count: int, device: torch.device) -> torch.Tensor:
        """At least `count` factors: no more memory than the largest array so far needs."""
        if device not in self._factors or len(self._factors[device]) < count:
            self._factors.pop(device, None)
            self._factors[device] = _factors(count, device)
        return self._factors[device]


def _factors(count: int, device: torch.device) -> torch.Tensor:
    """Odd numbers that look like random ones, each a function of its place."""
    mixed = torch.arange(1, count + 1, device=device).mul_(_FIRST)
    mixed.bitwise_xor_(mixed >> 32).mul_(_SECOND)
    return mixed.bitwise_xor_(mixed >> 29).bitwise_or_(1)
