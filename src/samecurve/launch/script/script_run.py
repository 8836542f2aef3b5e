"""`samecurve run`: runs any script that torchrun starts, on all devices of this machine.

This process does not import torch, so the ranks start at once.
"""

import os
import shlex
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from samecurve.errors import RunError, SamecurveError, UserError, keeping
from samecurve.launch.script.output import say
from samecurve.launch.script.placement import Placement, lay_out, refuse_nested, settings
from samecurve.launch.script.requirements import find_module, find_script, read_source
from samecurve.launch.script.script_attempt import Request, Script, ScriptAttempt
from samecurve.probe import find_gpus
from samecurve.processes.orphan_guard import OrphanGuard
from samecurve.run.run_names import free_name
from samecurve.units import counted, show_seconds


def run(request: Request) -> int:
    """Run the script. Returns 0, or 128 + the signal that stopped it.

    SamecurveError: why it failed, with the exit code of the first rank that failed.
    """
    refuse_nested(os.environ)
    find = find_module if request.module else find_script
    source = read_source(find(request.target))
    placement = lay_out(
        find_gpus(os.environ), gpus=request.gpus, nproc=request.nproc, jax=source.jax
    )
    logs = _make_logs(request)
    added, kept = settings(placement, os.environ)
    typed = {argument.partition("=")[0] for argument in request.arguments}
    local_rank_option = None if source.local_rank in typed else source.local_rank
    _announce(placement, logs, added=added, kept=kept, local_rank_option=local_rank_option)
    script = Script(request, placement, logs, {**os.environ, **added}, local_rank_option)
    began = time.monotonic()
    with OrphanGuard() as orphans, keeping(f"logs {logs}"):
        for number in range(request.max_restarts + 1):
            attempt = ScriptAttempt(script, number)
            failure = attempt.run(orphans)
            if attempt.stopped_by:
                say("stop", f"by {signal.Signals(attempt.stopped_by).name}; logs {logs}")
                return 128 + attempt.stopped_by
            if failure is None:
                ranks = counted(placement.processes, "rank")
                say("done", f"{ranks} in {show_seconds(time.monotonic() - began)}; logs {logs}")
                return 0
            _raise_if_final(failure, number, request.max_restarts)
            say(
                "again",
                f"{_cause_line(failure)}; all ranks start anew: restart {number + 1} of"
                f" {request.max_restarts}",
            )
            _set_logs_aside(logs, placement.processes, number)
    raise AssertionError("the last attempt returns or raises")


def _raise_if_final(failure: SamecurveError, number: int, max_restarts: int) -> None:
    """Raise the failure where all restarts are used up, or none would help."""
    if number == max_restarts:
        raise failure
    if isinstance(failure, RunError) and not failure.again:
        failure.remedy += "; not started again: the same would happen"
        raise failure


def _announce(
    placement: Placement,
    logs: Path,
    *,
    added: Mapping[str, str],
    kept: list[str],
    local_rank_option: str | None,
) -> None:
    """Say what is about to be started, and with which environment."""
    say("run", f"{placement.why}; logs {logs}")
    shown = " ".join(f"{name}={shlex.quote(value)}" for name, value in added.items())
    if kept:
        shown += f"; as you set it: {' '.join(kept)}"
    say("env", shown)
    if "MASTER_PORT" in os.environ:
        port = os.environ["MASTER_PORT"]
        say("note", f"MASTER_PORT={port} is not used: each run takes a free port")
    if local_rank_option:
        say(
            "note",
            f"the script's parser has {local_rank_option}, so each rank is given"
            f" {local_rank_option}=N, as torch.distributed.launch does",
        )


def _cause_line(error: SamecurveError) -> str:
    """The error's cause without the traceback."""
    lines = error.cause.splitlines()
    return next((line for line in lines if line.startswith("rank ")), lines[0])


def _make_logs(request: Request) -> Path:
    logs = request.log_dir
    if logs is None:
        name = Path(request.target).stem
        if request.module:
            name = request.target.rpartition(".")[2]
        logs = free_name(name, "--log-dir") / "logs"
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{logs} can't be made: {error.strerror}",
            "--log-dir DIR where you may write",
            "--log-dir",
        ) from None
    return logs


def _set_logs_aside(logs: Path, processes: int, attempt: int) -> None:
    """Rename the logs of a failed attempt: rank-1.attempt-0.log."""
    for rank in range(processes):
        path = logs / f"rank-{rank}.log"
        path.replace(path.with_name(f"rank-{rank}.attempt-{attempt}.log"))
