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
from samecurve.run.directory import Run

MEETING = (
    10  # times plan.preflight: ranks may start minutes apart where libraries come over a network
)


class Deadline:
    """Ends this process if what is done inside takes longer than `seconds` (0: no limit): a
    collective that hangs can't be interrupted otherwise.

    what: is done inside. speaks: no launcher tells the failure.
    """

    def __init__(
        self, seconds: int, what: str, plan: Plan, run: Run, attempt: str, rank: Rank, speaks: bool
    ) -> None:
        self._error = _silent(seconds, what, rank, plan)
        self._seconds, self._run, self._attempt, self._rank, self._speaks = (
            seconds,
            run,
            attempt,
            rank,
            speaks,
        )
        self._timer = threading.Timer(seconds, self._expire)
        self._timer.daemon = True

    def __enter__(self) -> None:
        if self._seconds:
            self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _expire(self) -> None:
        error = self._error
        with suppress(OSError):
            write_note(self._run.logs, self._attempt, note_of(self._rank.index, error))
        with suppress(OSError):
            print(f"error: {error}", file=sys.stderr, flush=True)
        if self._speaks:
            record_failure(self._run, error)
        os._exit(error.exit_code)


def check_sum(found: float, plan: Plan) -> None:
    """RunError: devices pass on wrong numbers."""
    if found != plan.num_devices:
        raise RunError(
            f"pre-flight: a 1 from each of {plan.num_devices} devices added up to {found:g}",
            f"transfers between these devices lose data: {_ways(plan)}",
            "devices",
        )


def _silent(seconds: int, what: str, rank: Rank, plan: Plan) -> RunError:
    return RunError(
        f"pre-flight: {what} over {plan.num_devices} devices did not end within {seconds} s (rank"
        f" {rank.index} of {rank.world_size} waited; {plan.engine}, {plan.backend})",
        "a rank that is stopped or overloaded, or devices that don't reach each other:"
        f" {_ways(plan)}; --set devices.preflight={10 * plan.preflight} waits longer,"
        " --no-preflight leaves this check out",
        "devices",
        again=True,
    )


def _ways(plan: Plan) -> str:
    if plan.devices[0].kind == "cuda":
        return (
            "NCCL_DEBUG=INFO says more; NCCL_P2P_DISABLE=1 or --sync-backend cpu goes around a"
            " broken link between GPUs"
        )
    return (
        "GLOO_SOCKET_IFNAME=lo keeps ranks of one machine off its network"
        if plan.world_size > 1
        else "`top` shows what else keeps the cores"
    )


def record_failure(run: Run, failure: SamecurveError) -> None:
    """The journal's last word, by whoever still lives."""
    pulse = read_heartbeat(run.logs / "pulse-0")
    with suppress(
        OSError
    ):  # a full disk is what may have failed; the terminal is told all the same
        append_event(
            run.journal,
            Event(
                "failed",
                pulse[0] if pulse else 0,
                {"cause": failure.cause, "remedy": failure.remedy},
            ),
        )


def left_hanging(run: Run, error: RunError) -> None:
    """End this process, whose own thread found that a rank hangs."""
    record_failure(run, error)
    with suppress(OSError):
        os.write(2, f"error: {error}\n".encode())
    os._exit(error.exit_code)
