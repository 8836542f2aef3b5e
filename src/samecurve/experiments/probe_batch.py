"""--probe-batch: try how many samples fit into memory at once.

Sizes are tried in throw-away processes, never in the run itself.
"""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from samecurve.core.config.sections import Batch, Config
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.machine import Machine
from samecurve.core.planning.memory import usable_share
from samecurve.core.planning.planner import plan
from samecurve.errors import UserError
from samecurve.experiments.scratch import for_steps_alone, make_run, run_on_ranks
from samecurve.features.balance import with_even_balance
from samecurve.launch.pool import JobFailedError, pool
from samecurve.observe import read_events
from samecurve.probe import probe
from samecurve.run.describe import describe
from samecurve.run.directory.attempt import Attempt
from samecurve.terminal import echo
from samecurve.units import counted, show_bytes
from samecurve.worker.jobs.train_job import try_out

_PATIENCE = 900.0  # seconds for one size
_TRIES = 8
_STEPS = 2  # the second step has the optimizer's state and warm caches


def probe_batch(config: Config) -> Facts:
    """Add the largest size that fits to the facts. UserError: not even one sample fits."""
    config = with_even_balance(config)  # uneven devices have no larger microbatch
    machine, facts = probe(), describe(config)
    if config.train.plan_chooses_bits:  # which would follow from the sizes that are tried
        config = config.with_bits(same=False)
    config_plan = plan(config, machine, facts)
    num_devices = config_plan.layout.num_devices
    share = -(-config_plan.batch.global_batch_size // num_devices)
    limit = int(
        min(one.memory * usable_share(one.kind, one.memory) for one in config_plan.layout.devices)
    )
    if config.devices.memory:
        limit = min(limit, config.devices.memory)
    echo(
        f"probe  up to {share} samples at once on each of {counted(num_devices, 'device')};"
        f" {show_bytes(limit)} may be used",
        err=True,
    )
    fits = largest_fitting(share, limit, lambda size: _peak_memory(config, machine, facts, size))
    if not fits:
        raise UserError(
            f"not even one sample at once fits into {show_bytes(limit)} under"
            f" {config_plan.layout.strategy}",
            "--strategy fsdp, --set train.recompute=block, or a smaller model",
            "--probe-batch",
        )
    return facts.having(largest_tried=fits)


def largest_fitting(share: int, limit: int, peak: Callable[[int], int | None]) -> int:
    """The largest microbatch up to `share` whose peak memory stays below the limit; 0: none.

    Sizes grow along a line through earlier peaks, so that a size that does not fit is rarely tried.

    peak: returns the peak bytes for a number of samples; None: out of memory
    """
    peaks: dict[int, int] = {}  # peaks of the sizes that fitted
    failed = share + 1
    size = 1
    for _ in range(_TRIES):
        memory = peak(size)
        if memory is None or memory > limit:
            failed = size
            echo(f"probe  {size} at once: did not fit", err=True)
        else:
            peaks[size] = memory
            echo(f"probe  {size} at once: {show_bytes(memory)} at most", err=True)
        largest = max(peaks, default=0)
        if largest + 1 >= failed:
            break  # no size lies between
        size = _next_size(peaks, failed=failed, share=share, limit=limit)
        if size == largest:
            break
    return max(peaks, default=0)


def _next_size(peaks: dict[int, int], *, failed: int, share: int, limit: int) -> int:
    """The next size to try; the largest fitting size itself, if there is no room for more.

    It lies on the line through the two largest fitting sizes. It is at most eight times the largest
    one and, once a size has failed, at most half way to that size.
    """
    largest = max(peaks, default=0)
    smaller = [size for size in peaks if size < largest]
    if smaller:
        second = max(smaller)
        slope = max(1.0, (peaks[largest] - peaks[second]) / (largest - second))
        room = int((limit - peaks[largest]) / slope)
        if not room:
            return largest
        ahead = min(largest + room, largest * 8)
    else:
        ahead = largest * 2
    ceiling = (largest + failed) // 2
    if failed > share:
        ceiling = failed - 1
    return max(largest + 1, min(ahead, ceiling))


def _peak_memory(config: Config, machine: Machine, facts: Facts, size: int) -> int | None:
    """Bytes that the fullest device holds with `size` samples at once; None: out of memory."""
    num_devices = plan(config, machine, facts).layout.num_devices
    tried = config.with_values(batch=Batch(samples=size * num_devices))
    tried_plan = plan(tried, machine, facts.having(largest_tried=size))
    short = replace(for_steps_alone(tried_plan), steps=_STEPS)
    with (
        tempfile.TemporaryDirectory(prefix="samecurve-probe-") as home,
        pool(short.layout.world_size, Path(home) / "ranks.log", _PATIENCE) as ranks,
    ):
        run = make_run(Path(home) / "run", tried, short)
        try:
            run_on_ranks(ranks, short, try_out, Attempt("probe", str(run.home)).to_json())
        except JobFailedError as error:
            if "ran out of memory" in error.cause or error.ended:
                return None
            raise
        steps = [event for event in read_events(run.journal) if event.kind == "step"]
        return max(int(step.values["memory_bytes"]) for step in steps)
