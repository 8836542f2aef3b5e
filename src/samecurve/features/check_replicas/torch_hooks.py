"""The comparison in engine torch: the bits of what several ranks, or devices of one process, hold
alike: parameters, frozen ones too, buffers, the moving average and the optimizer's state.

Each array is hashed on its device (BitSums), and all ranks add up one small table. A step
between two comparisons has no part in it.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import nn

from samecurve.features.check_replicas.verdict import ReplicaHashes, check_alike
from samecurve.features.guard.weights import BitSums
from samecurve.torch_engine.checkpoint import Entry, named_entries
from samecurve.torch_engine.optimizers import local_view
from samecurve.torch_engine.step import EngineSetup, State
from samecurve.torch_engine.step.feature_hooks import TorchHooks
from samecurve.torch_engine.step.training_step import TrainingStep

Parts = Mapping[str, tuple[torch.Tensor, int]]  # by name: values, and where in the array they begin


class Hooks(TorchHooks):
    """Compares when the loop asks for it, and before some updates."""

    value: int  # steps between comparisons

    def add_to(self, steps: Sequence[TrainingStep]) -> None:
        if self.setup.has_several_devices:
            for step in steps:
                compare = CompareBeforeUpdate(self.setup, step.state, self.value)
                step.after_reduction.append(compare)

    def compare(self, state: State, step: int) -> int:
        """Compare after so many steps, on all ranks. Returns the number of arrays compared.

        RunError, on every rank: an array differs.
        """
        left_out = self.setup.moved_buffers  # each rank moves them by itself
        if self.setup.plan.compute.allow_coupled:
            left_out = {name for name, _ in state.model.named_buffers()}
        return compare_replicas(self.setup, state, step, left_out)


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
    update, which will give all of them the first one's parameters again.
    """

    def __init__(self, setup: EngineSetup, state: State, interval: int) -> None:
        self._setup, self._interval, self._done = setup, interval, state.step

    @torch.no_grad()
    def __call__(self) -> bool:
        """Returns True: the hook comes again. RunError: a parameter differs."""
        self._done += 1
        if self._done % self._interval == 0:
            replicas = self._setup.strategy.models
            holders = [dict(_arrays_of(model, buffers=False)) for model in replicas]
            _compare(self._setup, holders, self._done)
        return True


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
