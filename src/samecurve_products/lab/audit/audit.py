"""`samecurve audit`: does a past run come out again?

Some steps are trained anew from the nearest earlier checkpoint, on the devices that are here, and
held against the journal.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from samecurve.seam import (
    CorruptCheckpointError,
    Event,
    Plan,
    Run,
    SamecurveError,
    UserError,
    checkpoints,
    read_events,
    scratch,
)
from samecurve_products.lab.audit.picks import Pick, pick_at_random, pick_named
from samecurve_products.lab.audit.replay import Replayer, Start, start_at, start_of_run
from samecurve_products.report.compare.compare_runs import Comparison, compare

# relative, of losses and norms; a run with the same bits on any devices has none
TOLERANCE = {"f64": 1e-10, "f32": 1e-4, "bf16": 3e-2, "f16": 3e-2}


@dataclass(frozen=True, kw_only=True)
class Audited:
    """What a replay of one step shows."""

    step: int
    start: int  # the step of the checkpoint that the replay went on from; 0: the beginning
    difference: float  # the largest relative one of a loss or norm, up to this step
    comparison: Comparison | None  # of the whole replay
    verdict: str  # PASS, FAIL; FAILED: it could not be trained anew
    culprit: str
    seconds: float


@dataclass(frozen=True)
class Audit:
    """A run under audit."""

    run: Run
    plan: Plan  # as it was last trained
    picks: Sequence[Pick]
    starts: Mapping[int, Start]

    @property
    def tolerance(self) -> float:
        return 0.0 if self.plan.same_bits else TOLERANCE[self.plan.compute.precision]


def begin_audit(home: Path, *, step: int | None, steps: int, seed: int) -> Audit:
    """Choose the steps. UserError: the path is no run, or it has no step that can be replayed."""
    run = Run(home)
    run.check("RUN")
    if not run.exists() or not run.journal.is_file():
        raise UserError(
            f"{home} is no run directory",
            "a directory with plan.json and journal.jsonl in it",
            "RUN",
        )
    events = read_events(run.journal)
    trained = [event.step for event in events if event.kind == "step"]
    if not trained:
        raise UserError(f"{home} has trained no step yet", "a run that has", "RUN")
    starts = _starts(run, events)
    own_plan, last = run.read_plan(), max(trained)
    # between a checkpoint and the end of the journal
    rising = [at for at in sorted(starts) if at < last]
    if not rising:
        raise UserError(
            f"{home} has nothing left to train a step from: only its last checkpoint is there",
            "train.keep (--max-checkpoints) keeps more of them",
            "RUN",
        )
    if step is not None:
        picks = [pick_named(step, rising, last)]
    else:
        picks = pick_at_random(steps, rising, last, same_bits=own_plan.same_bits, seed=seed)
    return Audit(run, own_plan, picks, starts)


def _starts(run: Run, events: Sequence[Event]) -> dict[int, Start]:
    """By step: the checkpoints that are whole, and the run's own beginning."""
    starts: dict[int, Start] = {}
    parent = run.parent_checkpoint()
    for path in (*checkpoints(run.checkpoints), *([Path(parent)] if parent else [])):
        with suppress(CorruptCheckpointError):  # check_journal() says what is damaged
            start = start_at(path)
            starts.setdefault(start.step, start)
    first = next((event for event in events if event.kind == "planned"), None)
    if parent is None and first is not None and first.step == 0:
        starts.setdefault(0, start_of_run(Plan.from_json(first.values["plan"])))
    return starts


def audit(
    under: Audit,
    settings: Mapping[str, tuple[Any, str]],
    *,
    say: Callable[[str], None],
    begun: Callable[[Plan], None],
    judged: Callable[[Audited], None],
) -> list[Audited]:
    """Train the picked steps anew, and judge each.

    settings: config key -> (value, the flag that sets it)
    say: shows a line of a replay
    begun: called with the first replay's plan
    judged: called with each verdict as soon as it is there
    """
    results: list[Audited] = []
    replayer = Replayer(under.run, settings, say)
    with scratch("audit") as home:
        for start_step, group in groupby(under.picks, key=lambda pick: pick.start):
            picks, start = list(group), under.starts[start_step]
            own_plan = replayer.plan(start)
            if not results:
                begun(own_plan)
            began = time.perf_counter()
            try:
                replayed = replayer.replay(start, picks[-1].step, home / f"from-{start_step}")
                comparison = compare(under.run.home, replayed.home)
                differences = _differences(under.run, replayed)
            except UserError:
                raise
            except SamecurveError as error:
                seconds = time.perf_counter() - began
                of_group = [_failed(pick, error, seconds) for pick in picks]
            else:
                seconds = time.perf_counter() - began
                of_group = [
                    _judge(pick, comparison, differences, under.tolerance, seconds)
                    for pick in picks
                ]
            for one in of_group:
                judged(one)
            results += of_group
    return results


def _differences(original: Run, replayed: Run) -> dict[int, tuple[float, str]]:
    """By step, in rising order: the larger relative difference of loss and norm, and which."""
    values: list[dict[int, Mapping[str, Any]]] = [
        {event.step: event.values for event in read_events(run.journal) if event.kind == "step"}
        for run in (original, replayed)
    ]
    first, second = values
    return {
        step: max(
            (_relative(first[step].get(name), second[step].get(name)), name)
            for name in ("loss", "grad_norm")
        )
        for step in sorted(first.keys() & second.keys())
    }


def _relative(value: float | None, other: float | None) -> float:
    if value == other:
        return 0.0
    if value is None or other is None:
        return float("inf")
    return abs(value - other) / max(abs(value), abs(other))


def _judge(
    pick: Pick,
    comparison: Comparison,
    differences: Mapping[int, tuple[float, str]],
    tolerance: float,
    seconds: float,
) -> Audited:
    until = {step: pair for step, pair in differences.items() if step <= pick.step}
    culprit = ""
    largest = max((difference for difference, _ in until.values()), default=float("inf"))
    off = [(step, *pair) for step, pair in until.items() if pair[0] > tolerance]
    if off:
        step, difference, name = off[0]
        culprit = f"step {step}: the {name} differs by {difference:.1e}"
    if not tolerance and comparison.arrays and (comparison.arrays_at or 0) <= pick.step:
        # an array says more than a norm, where both are of the same step
        if not off or (comparison.arrays_at or 0) < off[0][0]:
            culprit = f"step {comparison.arrays_at}: {_named(comparison.arrays)} differs"
        elif comparison.arrays_at == off[0][0]:
            culprit += f", and {_named(comparison.arrays)}"
    if pick.step not in until:
        culprit = culprit or f"step {pick.step} was not trained anew"
    return Audited(
        step=pick.step,
        start=pick.start,
        difference=largest,
        comparison=comparison,
        verdict="FAIL" if culprit else "PASS",
        culprit=culprit,
        seconds=seconds,
    )


def _named(arrays: Sequence[str]) -> str:
    return arrays[0] if len(arrays) == 1 else f"{arrays[0]} (and {len(arrays) - 1} more)"


def _failed(pick: Pick, error: SamecurveError, seconds: float) -> Audited:
    return Audited(
        step=pick.step,
        start=pick.start,
        difference=float("inf"),
        comparison=None,
        verdict="FAILED",
        culprit=f"{error.cause}. Remedy: {error.remedy}" if error.remedy else error.cause,
        seconds=seconds,
    )
