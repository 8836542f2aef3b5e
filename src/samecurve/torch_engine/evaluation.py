"""A task's sums over its held-out samples, over all devices."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from samecurve.core.determinism.microbatches import count_microbatches
from samecurve.core.evaluation import EvalSums, SumSpecs, check_shape, size, unpack_sums
from samecurve.core.protocols import Arrays, MicroBatch, Progress, Round
from samecurve.torch_engine.precision import autocast_for, current_device
from samecurve.torch_engine.step import EngineSetup
from samecurve.torch_engine.step.step_metrics import tree_sum
from samecurve.torch_engine.step.training_step import to_device


class MicroBatchSums(NamedTuple):
    """The sums of one microbatch."""

    floats: torch.Tensor  # in a row
    counts: torch.Tensor  # in a row, int64
    measured: list[Any]  # by each feature that measures


@torch.no_grad()
def evaluate(
    setup: EngineSetup, rounds: Iterable[Sequence[Round]], progress: Progress, samples: int
) -> EvalSums:
    """Counts are added as integers, in any order; the others by the plan's reducer: along the tree,
    with a row for each microbatch, or in the order of the microbatches. All ranks call it together,
    models in evaluation mode.

    samples: of all rounds, over all ranks
    """
    specs, by_tree = setup.task.eval_sums(), setup.plan.compute.reducer == "tree"
    num_microbatches = count_microbatches(samples, setup.plan.batch.micro_batch_size)
    num_rows = num_microbatches if by_tree else 1
    num_floats, num_counts = size(specs, integer=False), size(specs, integer=True)
    floats = torch.zeros(num_rows, num_floats, dtype=torch.float64, device=setup.device)
    counts = torch.zeros(num_counts, dtype=torch.int64, device=setup.device)
    measuring = [hooks for hooks in setup.features.values() if hooks.measures]
    measured: list[tuple[int, list[Any]]] = []
    evaluate_one = partial(
        _evaluate_microbatch, setup, specs=specs, progress=progress, measuring=measuring
    )
    for microbatches in (each for staged in rounds for each in staged):
        jobs = [partial(evaluate_one, *numbered) for numbered in enumerate(microbatches)]
        sums = setup.strategy.run_jobs(jobs)
        for microbatch, added in zip(microbatches, sums, strict=True):
            if microbatch is not None and added is not None:
                floats[microbatch.number if by_tree else 0] += added.floats
                counts += added.counts
                measured.append((microbatch.number, added.measured))
    for index, hooks in enumerate(measuring):
        own = [(number, values[index]) for number, values in measured]
        hooks.add_measured(own, specs, floats, progress=progress, samples=samples)
    floats = tree_sum(setup.comm.all_reduce(floats)())
    if len(counts):
        counts = setup.comm.all_reduce(counts)()
    return unpack_sums(specs, floats.cpu().numpy(), counts.cpu().numpy())


def _evaluate_microbatch(
    setup: EngineSetup,
    device_index: int,
    microbatch: MicroBatch | None,
    *,
    specs: SumSpecs,
    progress: Progress,
    measuring: Sequence[Any],
) -> MicroBatchSums | None:
    """None: nothing is to be added. measuring: the hooks of features that measure"""
    if microbatch is None:
        return None
    device, task = setup.devices[device_index], setup.task

    def measure(model: Any, arrays: Arrays) -> tuple[Mapping[str, Any], list[Any]]:
        sums = task.evaluate(model, arrays, progress)
        return sums, [hooks.measure(model, arrays, progress) for hooks in measuring]

    with (
        torch.no_grad(),
        current_device(device),
        setup.contexts[device_index].within(microbatch.keys, real=microbatch.real),
        autocast_for(setup.plan.compute.precision, device),
    ):
        arrays = to_device(microbatch.arrays, device)
        sums, measured = setup.strategy.call(device_index, measure, arrays)
    if not microbatch.real:
        return None
    rows: dict[bool, list[torch.Tensor]] = {False: [], True: []}  # of integers
    for name, spec in specs.items():
        dtype = torch.int64 if spec.integer else torch.float64
        value = torch.as_tensor(sums[name], dtype=dtype)
        check_shape(name, value.shape, spec)
        rows[spec.integer].append(value.to(setup.device).reshape(-1))
    empty = torch.zeros(0, dtype=torch.int64, device=setup.device)
    return MicroBatchSums(
        torch.cat(rows[False] or [empty]), torch.cat(rows[True] or [empty]), measured
    )
