"""A task's sums over its held-out samples, over all devices."""

from collections.abc import Iterable, Sequence
from functools import partial

import torch

from samecurve.core.eval_sums import EvalSums, SumSpecs, check_shape, size, unpack_sums
from samecurve.core.protocols import MicroBatch, Progress, Round
from samecurve.torch_engine.precision import autocast_for, current_device
from samecurve.torch_engine.setup import EngineSetup
from samecurve.torch_engine.step_totals import tree_sum
from samecurve.torch_engine.training_step import to_device


@torch.no_grad()
def evaluate(setup: EngineSetup, rounds: Iterable[Sequence[Round]], progress: Progress) -> EvalSums:
    """Counts are added as integers, exact in any order; exact runs add the others along the tree,
    with a row for each microbatch. All ranks call it together, models in evaluation mode.
    """
    specs = setup.task.eval_sums()
    num_rows = setup.num_sum_rows(setup.plan.eval_samples)
    num_floats, num_counts = size(specs, integer=False), size(specs, integer=True)
    floats = torch.zeros(num_rows, num_floats, dtype=torch.float64, device=setup.device)
    counts = torch.zeros(num_counts, dtype=torch.int64, device=setup.device)
    for microbatches in (microbatches for staged in rounds for microbatches in staged):
        sums = setup.strategy.run_jobs(
            [
                partial(_evaluate_microbatch, setup, index, microbatch, specs, progress)
                for index, microbatch in enumerate(microbatches)
            ]
        )
        for microbatch, added in zip(microbatches, sums, strict=True):
            if added is not None:
                floats[setup.sum_row(microbatch)] += added[0]
                counts += added[1]
    floats = tree_sum(setup.comm.all_reduce(floats)())
    if len(counts):
        counts = setup.comm.all_reduce(counts)()
    return unpack_sums(specs, floats.cpu().numpy(), counts.cpu().numpy())


def _evaluate_microbatch(
    setup: EngineSetup,
    device_index: int,
    microbatch: MicroBatch | None,
    specs: SumSpecs,
    progress: Progress,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Its sums in a row, and its counts in another; None: nothing is to be added."""
    if microbatch is None:
        return None
    device = setup.devices[device_index]
    with (
        torch.no_grad(),
        current_device(device),
        setup.contexts[device_index].within(microbatch.keys, real=microbatch.real),
        autocast_for(setup.plan.precision, device),
    ):
        arrays = to_device(microbatch.arrays, device)
        sums = setup.strategy.call(device_index, setup.task.evaluate, arrays, progress)
    if not microbatch.real:
        return None
    rows: dict[bool, list[torch.Tensor]] = {False: [], True: []}  # of integers
    for name, spec in specs.items():
        dtype = torch.int64 if spec.integer else torch.float64
        value = torch.as_tensor(sums[name], dtype=dtype)
        check_shape(name, value.shape, spec)
        rows[spec.integer].append(value.to(setup.device).reshape(-1))
    empty = torch.zeros(0, dtype=torch.int64, device=setup.device)
    return torch.cat(rows[False] or [empty]), torch.cat(rows[True] or [empty])
