"""New starts of a run's ranks after a failure: whether one may help, and from which checkpoint."""

import time
from dataclasses import replace
from pathlib import Path

from samecurve.checkpoint import read_manifest
from samecurve.checkpoint.store import newest, sweep
from samecurve.core.events import Event, Kind
from samecurve.errors import RunError, SamecurveError
from samecurve.observe import append_event, cut_torn_line, read_events
from samecurve.run.directory import Run
from samecurve.run.directory.attempt import Earlier, clear_logs, new_attempt_name
from samecurve.run.resume import set_later_aside
from samecurve.run.start_files import PreparedRun

_FRUITLESS = 3  # failures in a row from the same save


class RestartBudget:
    """Counts how often ranks may still be started again."""

    def __init__(self, allowed: int) -> None:
        """allowed: the number of restarts of the whole command."""
        self._allowed, self.used = allowed, 0
        self.gave_up = False  # other starts were tried, and did not help
        self._saves: list[str | None] = []  # the checkpoint that each restart went on from

    def spend(self, failure: SamecurveError, save: str | None) -> str | None:
        """Use up one restart.

        save: the checkpoint to go on from; None: the beginning.

        Returns None if the ranks may start again; else the reason, '' where restarts are off.
        """
        if not self._allowed:
            return ""
        if not (isinstance(failure, RunError) and failure.again):
            return "not started again: the same would happen"
        if self.used >= self._allowed:
            times = "once" if self.used == 1 else f"{self.used} times"
            return f"not started again: that was done {times} (--max-restarts)"
        self._saves.append(save)
        if len(self._saves) > _FRUITLESS and len(set(self._saves[-_FRUITLESS - 1 :])) == 1:
            self.gave_up = True
            return f"not started again: {_FRUITLESS} starts in a row failed before another save"
        self.used += 1
        return None


def prepare_restart(
    before: PreparedRun, failure: SamecurveError, began: float, budget: RestartBudget
) -> PreparedRun | str:
    """Prepare the next start of a run that failed, from its newest whole checkpoint.

    began: the time of the command's first start.

    Returns the reason, as a text, where the run is not started again.
    """
    failed_at = time.time()
    run, attempt = before.run, before.attempt
    checkpoint, damaged = newest(run.checkpoints)
    resume = str(checkpoint) if checkpoint else _elsewhere(attempt.resume, run)
    reason = budget.spend(failure, resume)
    if budget.gave_up and isinstance(failure, RunError):
        failure.give_up()
    if reason is not None:
        return reason
    step = int(read_manifest(Path(resume))["step"]) if resume else 0
    clear_logs(run.logs)
    sweep(run.checkpoints)
    aside = set_later_aside(run, step if checkpoint else None)
    cut_torn_line(run.journal)
    attempt = replace(attempt, name=new_attempt_name(), resume=resume)
    origin, resumed = "the beginning", "nothing was saved before: from the start"
    if resume:
        attempt = replace(attempt, weights=None)
        origin, resumed = f"step {step}", f"from {resume}"

    def record(kind: Kind, **values: object) -> None:
        append_event(run.journal, Event(kind, step, values))

    record(
        "restarted",
        attempt=attempt.name,
        text=f"{failure.cause}; start {budget.used + 1}, from {origin}",
        cause=failure.cause,
        restart=budget.used,
    )
    for line in (*damaged, *aside):
        record("warned", text=line)
    record("resumed", attempt=attempt.name, text=resumed)
    earlier = _count_earlier(run, began, failed_at)
    return replace(before, attempt=replace(attempt, earlier=earlier))


def _elsewhere(resume: str | None, run: Run) -> str | None:
    """The checkpoint that the failed start began from, if it belongs to another run."""
    if resume and not resume.startswith(str(run.checkpoints)):
        return resume
    return None


def _count_earlier(run: Run, began: float, failed_at: float) -> Earlier:
    """Sum up the command's earlier starts."""
    events = [event for event in read_events(run.journal) if event.time >= began]

    def seconds_of(kind: Kind) -> list[float]:
        values = [event.values.get("seconds") for event in events if event.kind == kind]
        return [float(value) for value in values if isinstance(value, int | float)]

    steps = seconds_of("step")
    return Earlier(
        began=began,
        steps=len(steps),
        useful=sum(steps),
        failed=failed_at,
        recoveries=tuple(seconds_of("recovered")),
    )
