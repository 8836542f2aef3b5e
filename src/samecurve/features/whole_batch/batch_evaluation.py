"""The evaluation of a loss over a whole batch: from the features of held-out samples."""

import math
from collections.abc import Sequence

import torch

from samecurve.core.determinism.microbatches import split_batch
from samecurve.core.determinism.sample_keys import step_key
from samecurve.core.evaluation import SumSpecs
from samecurve.core.protocols import Progress
from samecurve.features.whole_batch.gathered_features import (
    Features,
    FeatureTable,
    Part,
    check_rows,
)
from samecurve.torch_engine.precision import autocast_for, current_device
from samecurve.torch_engine.randomness import seed_host
from samecurve.torch_engine.step import EngineSetup

_LOSS = ("loss.sum", "loss.weight")  # among a task's sums, zeros where it is a whole batch's


def add_batch_losses(
    setup: EngineSetup,
    measured: Sequence[tuple[int, Features]],
    specs: SumSpecs,
    floats: torch.Tensor,
    *,
    progress: Progress,
    samples: int,
) -> None:
    """The loss of each global batch of held-out samples in turn, the last one short; ranks take
    turns.

    measured: by number of the microbatch, of those that this process has
    floats: [rows, sums], to which it is added

    UserError: features() gives another number of rows than there are samples.
    """
    parts, size = [], setup.plan.batch.micro_batch_size
    for number, features in measured:
        first = number * size
        check_rows(features, min(size, samples - first))
        parts.append((first, features))
    table = FeatureTable(setup.comm, setup.device)
    columns = _columns(specs)
    batches = split_batch(samples, setup.plan.batch.global_batch_size)
    for number, (begin, end) in enumerate(batches):
        within = [_cut(part, begin, end) for part in parts]
        whole = table.put_together([part for part in within if part], end - begin)
        if number % setup.comm.world_size != setup.comm.rank:
            continue
        if setup.draw_sites.seeds_batch_loss:  # whichever rank's turn it is
            seed_host(step_key(setup.plan.fixed.seed, progress.epoch, number))
        with current_device(setup.device), autocast_for(setup.plan.compute.precision, setup.device):
            loss = setup.task.batch_losses(whole, progress)["loss"]
        row = begin // setup.plan.batch.micro_batch_size if len(floats) > 1 else 0
        for name, value in zip(_LOSS, loss, strict=True):
            floats[row, columns[name]] += value


def _columns(specs: SumSpecs) -> dict[str, int]:
    """Where the sums that are not integers begin in their row."""
    columns, begin = {}, 0
    for name, spec in specs.items():
        if not spec.integer:
            columns[name] = begin
            begin += math.prod(spec.shape)
    return columns


def _cut(part: Part, begin: int, end: int) -> Part | None:
    """The samples of a part that lie in a batch, counted from the batch's first; None: there are
    none.
    """
    first, features = part
    count = len(next(iter(features.values())))
    low, high = max(begin, first), min(end, first + count)
    if low >= high:
        return None
    return low - begin, {name: rows[low - first : high - first] for name, rows in features.items()}
