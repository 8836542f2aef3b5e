"""A run of one process, trained in the process of its command."""

import traceback
from contextlib import suppress

from samecurve.core.protocols import Rank
from samecurve.errors import SamecurveError, is_ctrl_c
from samecurve.launch.signals import children_ended
from samecurve.run.start_files import PreparedRun
from samecurve.watch.silence import HangLimit
from samecurve.watch.watch_process import watched_from_outside
from samecurve.worker.main import run_rank


def train_in_place(prepared: PreparedRun, limit: HangLimit) -> SamecurveError | None:
    """Train in this process. Returns why the run failed, if it did.

    limit: how long the run may be silent
    """
    run = prepared.run
    try:
        with (
            children_ended(),
            watched_from_outside(run.journal, run.logs, world_size=1, limit=limit),
        ):
            run_rank(prepared.attempt, Rank(0, 0, 1))
        return None
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        from samecurve.diagnose.crash import explain
        from samecurve.diagnose.notes import note_of

        # a full disk may be what has failed; the screen shows the cause all the same
        path = run.logs / "rank-0.log"
        with suppress(OSError), open(path, "a", errors="backslashreplace") as log:
            traceback.print_exc(file=log)
        return explain([note_of(0, error, run.home)], {}, run.logs)
