"""Before the first step: one small collective over all devices, with a time limit that ends the
process, and a sum that must be right.
"""

import os
import sys
import threading
from contextlib import suppress

from samecurve.core.events import Event
from samecurve.core.planning.plan import Plan
from samecurve.core.protocols import Rank
from samecurve.diagnose.notes import note_of, write_note
from samecurve.errors import RunError, SamecurveError
from samecurve.observe.heartbeat import read_heartbeat
from samecurve.observe.journal import append_event
from samecurve.run.directory.run_directory import Run
from samecurve.worker.context import RankContext

# times plan.layout.preflight: ranks may start minutes apart where libraries come over a network
MEETING = 10


class Deadline:
    """Ends this process if what is done inside takes longer: a collective that hangs can't be
    interrupted otherwise.
    """

    def __init__(self, seconds: int, what: str, context: RankContext, *, speaks: bool) -> None:
        """seconds: 0: no limit.

        what: is done inside, in words.
        speaks: no launcher tells the failure.
        """
        self._error = _timed_out(seconds, what, context.rank, context.plan)
        self._seconds, self._context, self._speaks = seconds, context, speaks
        self._timer = threading.Timer(seconds, self._expire)
        self._timer.daemon = True

    def __enter__(self) -> None:
        if self._seconds:
            self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _expire(self) -> None:
        error, context = self._error, self._context
        with suppress(OSError):
            note = note_of(context.rank.index, error)
            write_note(context.run.logs, context.attempt.name, note)
        with suppress(OSError):
            print(f"error: {error}", file=sys.stderr, flush=True)
        if self._speaks:
            record_failure(context.run, error)
        os._exit(error.exit_code)


def check_sum(total: float, plan: Plan) -> None:
    """RunError: devices pass on wrong numbers."""
    if total != plan.num_devices:
        raise RunError(
            f"pre-flight: a 1 from each of {plan.num_devices} devices added up to {total:g}",
            f"transfers between these devices lose data: {_remedy(plan)}",
            "devices",
        )


def _timed_out(seconds: int, what: str, rank: Rank, plan: Plan) -> RunError:
    return RunError(
        f"pre-flight: {what} over {plan.num_devices} devices did not end within {seconds} s (rank"
        f" {rank.index} of {rank.world_size} waited; {plan.engine}, {plan.backend})",
        "a rank that is stopped or overloaded, or devices that don't reach each other:"
        f" {_remedy(plan)}; --set devices.preflight={10 * plan.layout.preflight} waits longer,"
        " --no-preflight leaves this check out",
        "devices",
        again=True,
    )


def _remedy(plan: Plan) -> str:
    if plan.devices[0].kind == "cuda":
        return (
            "NCCL_DEBUG=INFO says more; NCCL_P2P_DISABLE=1 or --sync-backend cpu goes around a"
            " broken link between GPUs"
        )
    if plan.world_size > 1:
        return "GLOO_SOCKET_IFNAME=lo keeps ranks of one machine off its network"
    return "`top` shows what else keeps the cores"


def record_failure(run: Run, failure: SamecurveError) -> None:
    """The journal's last word, by whoever still lives."""
    heartbeat = read_heartbeat(run.logs / "heartbeat-0")
    step = heartbeat[0] if heartbeat else 0
    values = {"cause": failure.cause, "remedy": failure.remedy}
    with suppress(OSError):  # a full disk is what may have failed; the terminal has it all the same
        append_event(run.journal, Event("failed", step, values))


def end_hanging_process(run: Run, error: RunError) -> None:
    """End this process, whose own thread found that a rank hangs."""
    record_failure(run, error)
    with suppress(OSError):
        os.write(2, f"error: {error}\n".encode())
    os._exit(error.exit_code)
