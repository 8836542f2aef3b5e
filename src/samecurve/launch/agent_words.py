"""What ranks say to torch's agents of `--nnodes`, which start all ranks again after any exit code
but 0: whether another start may help, and whether the run goes on without a host that leaves.
"""

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from samecurve.core.loop import Outcome
from samecurve.core.system import write_json
from samecurve.errors import START_AGAIN, RunError, SamecurveError, UserError
from samecurve.observe import read_events
from samecurve.run.directory import Run
from samecurve.run.directory.attempt import Attempt, ControlFile
from samecurve.worker import ENDED, LEAVES

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_FRUITLESS = 3  # failures in a row before another save
_ANYTHING = "samecurve/anything"  # a key that nobody sets
_VERDICT = 2.5  # seconds in which the first rank says whether another start may help


def end_for_good(code: int, environment: Mapping[str, str] = os.environ) -> int:
    """Leave the exit code for this host's agent. Returns the code with which this rank ends."""
    if ENDED not in environment:
        return code
    Path(environment[ENDED]).write_text(str(code))
    return 0


def judge(error: SamecurveError, run: Run | None, attempt: Attempt | None) -> None:
    """Decide, as the first rank, whether another start may help, and tell all ranks.

    run, attempt: None: none has begun
    """
    if ENDED not in os.environ or not error.exit_code:  # 0: it is judged already
        return
    if isinstance(error, RunError) and error.again:
        starts = _fruitless_starts(run) if run else 0
        if starts <= _FRUITLESS:
            _tell(START_AGAIN, run, attempt)
            return
        error.give_up()
        error.remedy += f"; not started again: {starts} starts in a row failed before another save"
    _tell(error.exit_code, run, attempt)
    error.exit_code = end_for_good(error.exit_code)


def _tell(code: int, run: Run | None, attempt: Attempt | None) -> None:
    if run and attempt:
        with suppress(OSError):
            write_json(_verdict(run), [attempt.name, code])


def code_after(code: int, run: Run, attempt: Attempt, store: "Store") -> int:
    """The exit code of a rank that has failed, or was torn down by another's failure.

    store: served by the first rank, which judges as long as it lives
    """
    if not code or ENDED not in os.environ:
        return code
    if code == UserError.exit_code:
        return end_for_good(code)
    until = time.monotonic() + _VERDICT
    while time.monotonic() < until:
        with suppress(OSError, ValueError):
            name, final = json.loads(_verdict(run).read_text())
            if name == attempt.name:
                return code if final == START_AGAIN else end_for_good(int(final))
        if not run.exists():  # new, so the first rank removed it with what it refused
            return end_for_good(UserError.exit_code)
        try:
            store.check([_ANYTHING])
        except RuntimeError:  # the first rank is gone
            return code
        time.sleep(0.1)
    return code


def goes_on(run: Run, attempt: Attempt, outcome: Outcome | None) -> bool:
    """Whether the run stopped only since another host leaves, and goes on with this one."""
    if LEAVES not in os.environ or outcome != "stopped" or attempt.stop_at is not None:
        return False
    return not any(ControlFile(run, attempt.name).pending())


def _fruitless_starts(run: Run) -> int:
    """The starts since the last save, with the one that has just failed."""
    starts = 0
    for event in read_events(run.journal):
        if event.kind == "saved":
            starts = 0
        starts += event.kind == "started"
    return starts


def _verdict(run: Run) -> Path:
    return run.logs / "ended"
