"""Starting a run's ranks again after a failure: whether that may help, and from where."""

import time
from dataclasses import replace
from pathlib import Path

from samecurve.checkpoint.format import read_manifest
from samecurve.checkpoint.store import newest, sweep
from samecurve.core.events import Event
from samecurve.errors import RunError, SamecurveError
from samecurve.observe.journal import append_event, cut_torn_line, read_events
from samecurve.run.attempt import Earlier, new_attempt_name
from samecurve.run.prepare import PreparedRun, clear_logs

_FRUITLESS = 3  # failures in a row from the same save


class Budget:
    """allowed: how often ranks may be started again in all."""

    def __init__(self, allowed: int) -> None:
        self._allowed, self.used = allowed, 0
        self._from: list[str | None] = []

    def spend(self, failure: SamecurveError, saved: str | None) -> str | None:
        """Take one start.

        saved: what it would go on from. Returns why not, '' where nobody asked for any; None: it
        may start.
        """
        if not self._allowed:
            return ""
        if not (isinstance(failure, RunError) and failure.again):
            return "not started again: the same would happen"
        if self.used >= self._allowed:
            return (
                "not started again: that was done"
                f" {'once' if self.used == 1 else f'{self.used} times'} (--max-restarts)"
            )
        self._from.append(saved)
        if len(self._from) > _FRUITLESS and len(set(self._from[-_FRUITLESS - 1 :])) == 1:
            return f"not started again: {_FRUITLESS} starts in a row failed before another save"
        self.used += 1
        return None


def again(
    before: PreparedRun, failure: SamecurveError, began: float, budget: Budget
) -> PreparedRun | str:
    """The next start of a run that failed, from its newest whole checkpoint.

    began: when the command's first one did. A text: why there is none.
    """
    found = time.time()
    run, attempt = before.run, before.attempt
    whole, damaged = newest(run.checkpoints)
    resume = (
        str(whole)
        if whole
        else (
            attempt.resume
            if attempt.resume and not attempt.resume.startswith(str(run.checkpoints))
            else None
        )
    )
    reason = budget.spend(failure, resume)
    if reason is not None:
        return reason
    clear_logs(run)
    sweep(run.checkpoints)
    cut_torn_line(run.journal)
    step = int(read_manifest(Path(resume))["step"]) if resume else 0
    next_one = replace(
        attempt,
        name=new_attempt_name(),
        resume=resume,
        weights=attempt.weights if resume is None else None,
    )
    text = (
        f"{failure.cause}; start {budget.used + 1}, from"
        f" {f'step {step}' if resume else 'the beginning'}"
    )
    append_event(
        run.journal,
        Event(
            "restarted",
            step,
            {
                "attempt": next_one.name,
                "text": text,
                "cause": failure.cause,
                "restart": budget.used,
            },
        ),
    )
    for line in damaged:
        append_event(run.journal, Event("warned", step, {"text": line}))
    append_event(
        run.journal,
        Event(
            "resumed",
            step,
            {
                "attempt": next_one.name,
                "text": f"from {resume}" if resume else "nothing was saved before: from the start",
            },
        ),
    )
    lines = [event for event in read_events(run.journal) if event.time >= began]
    trained = [float(event.values["seconds"]) for event in lines if event.kind == "step"]
    recoveries = tuple(
        float(event.values["seconds"]) for event in lines if event.kind == "recovered"
    )
    return replace(
        before,
        attempt=replace(
            next_one, earlier=Earlier(began, len(trained), sum(trained), found, recoveries)
        ),
    )
