"""The check before the first step: one small collective over all devices, whose sum must be right.

Meeting the other ranks and the collective have a time limit, which ends the process.
"""

import os
import sys
import threading
from contextlib import suppress

from samecurve.core.planning.plan import Plan
from samecurve.core.protocols import Engine, Rank
from samecurve.diagnose.notes import note_of, write_note
from samecurve.errors import RunError
from samecurve.observe.failed_event import record_failure
from samecurve.worker.context import RankContext

# times plan.layout.preflight: ranks may start minutes apart where libraries come over a network
_MEETING = 10


def meeting_limit(context: RankContext, *, speaks: bool) -> "Deadline":
    """The time limit for meeting the other ranks. speaks: as Deadline."""
    seconds = _MEETING * context.plan.layout.preflight
    return Deadline(seconds, "meeting the other ranks", context, speaks=speaks)


def check_collective(context: RankContext, engine: Engine, *, speaks: bool) -> None:
    """Add up a 1 from each device. speaks: as Deadline. RunError: the sum is wrong."""
    plan = context.plan
    with Deadline(plan.layout.preflight, "a first collective", context, speaks=speaks):
        total = engine.preflight()
    if total != plan.layout.num_devices:
        raise RunError(
            f"pre-flight: a 1 from each of {plan.layout.num_devices} devices added up to {total:g}",
            f"transfers between these devices lose data: {_remedy(plan)}",
            "devices",
        )


class Deadline:
    """Ends this process if the block takes longer: a hanging collective can't be interrupted."""

    def __init__(self, seconds: int, what: str, context: RankContext, *, speaks: bool) -> None:
        """seconds: 0: no limit.

        what: what the block does, in words.
        speaks: this process reports the failure, since no launcher does.
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
            record_failure(context.run.journal, context.run.logs, error)
        os._exit(error.exit_code)


def _timed_out(seconds: int, what: str, rank: Rank, plan: Plan) -> RunError:
    return RunError(
        f"pre-flight: {what} over {plan.layout.num_devices} devices did not end within {seconds} s"
        f" (rank {rank.index} of {rank.world_size} waited; {plan.layout.engine},"
        f" {plan.layout.backend})",
        "a rank that is stopped or overloaded, or devices that don't reach each other:"
        f" {_remedy(plan)}; --set devices.preflight={10 * plan.layout.preflight} waits longer,"
        " --no-preflight leaves this check out",
        "devices",
        again=True,
    )


def _remedy(plan: Plan) -> str:
    if plan.layout.devices[0].kind == "cuda":
        return (
            "NCCL_DEBUG=INFO says more; NCCL_P2P_DISABLE=1 or --sync-backend cpu goes around a"
            " broken link between GPUs"
        )
    if plan.layout.world_size > 1:
        return "GLOO_SOCKET_IFNAME=lo keeps ranks of one machine off its network"
    return "`top` shows what else keeps the cores"
