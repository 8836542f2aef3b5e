"""--probe-batch: how many samples at once really fit, tried in throw-away processes, never in the
run itself.
"""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import click

from samecurve.core.config.sections import Batch, Config
from samecurve.core.planning.balance import with_even_balance
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.machine import Machine
from samecurve.core.planning.memory import USABLE
from samecurve.core.planning.plan import Plan, plan
from samecurve.errors import UserError
from samecurve.launch.pool import JobFailedError, pool
from samecurve.observe.journal import read_events
from samecurve.probe import probe
from samecurve.run.attempt import Attempt
from samecurve.run.describe import describe
from samecurve.run.directory import Run
from samecurve.units import show_bytes
from samecurve.worker.jobs.train import try_out

_PATIENCE = 900.0  # seconds for one size
_TRIES = 8
_STEPS = 2  # the second one has the optimizer's state and warm caches


def probe_batch(config: Config) -> Facts:
    """Facts with what fitted. UserError: not even one sample does."""
    config = with_even_balance(config)  # a slot for uneven devices is never larger
    machine, facts = probe(), describe(config)
    made = plan(config, machine, facts)
    share = -(-made.global_batch_size // made.num_devices)
    limit = min(
        int(min(device.memory for device in made.devices) * USABLE),
        config.devices.memory or 1 << 62,
    )
    click.echo(
        f"probe  up to {share} samples at once on each of {made.num_devices}"
        f" device{'s' if made.num_devices > 1 else ''}; {show_bytes(limit)} may be used",
        err=True,
    )
    fits = largest(share, limit, lambda micro: _peak(config, machine, facts, micro))
    if not fits:
        raise UserError(
            f"not even one sample at once fits into {show_bytes(limit)} under {made.strategy}",
            "--strategy fsdp, --set train.recompute=block, or a smaller model",
            "--probe-batch",
        )
    return replace(facts, largest_tried=fits)


def largest(share: int, limit: int, peak: Callable[[int], int | None]) -> int:
    """The largest micro-batch up to `share` whose peak stays below the limit; 0: none.

    peak None: it failed.

    Grows along the line through what was seen, so that a size that can't fit is rarely tried.
    """
    seen: dict[int, int] = {}
    failed = share + 1
    size = 1
    for _ in range(_TRIES):
        found = peak(size)
        click.echo(
            f"probe  {size} at once:"
            f" {'did not fit' if found is None or found > limit else f'{show_bytes(found)} at most'}",
            err=True,
        )
        if found is None or found > limit:
            failed = size
        else:
            seen[size] = found
        best = max(seen, default=0)
        if best + 1 >= failed:
            break  # nothing lies between
        size = _next(seen, best, failed, share, limit)
        if size == best:
            break
    return max(seen, default=0)


def _next(seen: dict[int, int], best: int, failed: int, share: int, limit: int) -> int:
    """Along the line through the two largest that fitted, at most eightfold; once one has failed,
    at most half way to it. The largest itself: the line leaves no room for one more.
    """
    smaller = [size for size in seen if size < best]
    if smaller:
        slope = max(1.0, (seen[best] - seen[max(smaller)]) / (best - max(smaller)))
        room = int((limit - seen[best]) / slope)
        if not room:
            return best
        ahead = min(best + room, best * 8)
    else:
        ahead = best * 2
    ceiling = failed - 1 if failed > share else (best + failed) // 2
    return max(best + 1, min(ahead, ceiling))


def _peak(config: Config, machine: Machine, facts: Facts, micro: int) -> int | None:
    """Bytes that the fullest device holds with `micro` samples at once; None: out of memory."""
    world = plan(config, machine, facts).num_devices
    tried = config.model_copy(update={"batch": Batch(samples=micro * world)})
    made: Plan = plan(tried, machine, replace(facts, largest_tried=micro))
    made = replace(made, steps=_STEPS, eval_samples=0, every=replace(made.every, sample=0))
    with (
        tempfile.TemporaryDirectory(prefix="samecurve-probe-") as scratch,
        pool(made.world_size, Path(scratch) / "ranks.log", _PATIENCE) as ranks,
    ):
        run = Run(Path(scratch) / "run")
        run.logs.mkdir(parents=True)
        run.write(tried, made)
        attempt = Attempt("probe", str(run.home))
        try:
            ranks.run(
                made.world_size,
                try_out,
                attempt.to_json(),
                backend=made.backend if made.backend in {"gloo", "nccl"} else "gloo",
            )
        except JobFailedError as error:
            if "ran out of memory" in error.cause or error.ended:
                return None
            raise
        return max(
            int(event.values["memory_bytes"])
            for event in read_events(run.journal)
            if event.kind == "step"
        )
