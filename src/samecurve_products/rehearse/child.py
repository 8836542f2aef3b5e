"""A command that is rehearsed, from its start to its end; none of its processes stays behind."""

import os
import signal
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import IO

import psutil

from samecurve.processes.orphan_guard import OrphanGuard
from samecurve.seam import Process, UserError, signal_group, start_program, wait_for

_GRACE = 10.0  # seconds that a command has to leave after Ctrl-C
_PATIENCE = 5.0  # seconds for its last words; a daemon of its own may hold its stderr for ever
_KEPT = 1 << 17  # bytes at the end of its stderr that are kept


@dataclass(frozen=True)
class Ended:
    """How a command ended. code: negative for a signal; errors: the end of its stderr"""

    code: int
    errors: str


def run_child(
    words: Sequence[str], environment: Mapping[str, str], *, output: int, shows_errors: bool
) -> Ended:
    """Run a command to its end.

    output: the file descriptor of its stdout
    shows_errors: whether its stderr is passed on as it comes

    UserError: there is no such program. Interrupted: a signal came; the command was stopped first.
    """
    try:
        process = start_program(
            words,
            environment=environment,
            new_session=True,  # a Ctrl-C reaches it through us, once
            stdin=DEVNULL,
            stdout=output,
            stderr=PIPE,
        )
    except OSError as error:
        raise UserError(
            f"{words[0]} can't be started: {error.strerror}",
            "a command that runs as it stands, such as: samecurve rehearse -- python SCRIPT",
            "rehearse",
        ) from None
    with OrphanGuard() as guard, process:
        guard.add(process.pid)
        assert process.stderr is not None
        kept = bytearray()
        reader = threading.Thread(
            target=_pass_on, args=(process.stderr, kept, shows_errors), name="errors", daemon=True
        )
        reader.start()
        try:
            process.wait()
        finally:
            if process.poll() is None:
                _stop(process)
            signal_group(process.pid)  # a process that it left running
            guard.remove(process.pid)
        reader.join(_PATIENCE)
    return Ended(process.returncode, kept.decode(errors="replace"))


def _pass_on(stream: IO[bytes], kept: bytearray, shows: bool) -> None:  # noqa: FBT001
    while block := os.read(stream.fileno(), 1 << 16):
        kept += block
        del kept[:-_KEPT]
        try:
            if shows:
                os.write(2, block)
        except BrokenPipeError:  # nobody reads any more
            shows = False


def _stop(process: Process) -> None:
    """Stop a command as Ctrl-C does; after a while kill it, and all that it has started."""
    started = psutil.Process(process.pid).children(recursive=True)  # torchrun's lead groups
    signal_group(process.pid, signal.SIGINT)
    if not wait_for([process], _GRACE):
        process.kill()
        process.wait()
    for child in started:
        with suppress(psutil.NoSuchProcess):
            child.kill()


def output_file(path: Path) -> int:
    """The descriptor of a new file for a command's output."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
