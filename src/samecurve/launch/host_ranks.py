"""The ranks of this host, as torch's agent of `--nnodes` starts and ends them.

They are forked from a process that has imported the engine, so that a start takes no import.
"""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from samecurve.core.system.child_process import child_environment, python_module
from samecurve.launch.supervisor import RankCommand, RankProcess
from samecurve.run.fork_server import Call, ForkServer

_TICK = 0.05  # seconds between two looks
# the call of a forked rank: `python -m samecurve` in a process that is there already
RUN_WORDS = "samecurve.cli.entry:run_words"


@dataclass(frozen=True)
class HostRanks:
    """Starts this host's ranks.

    words: the command line of a rank. server: forks them; None: each is started.
    """

    words: Sequence[str]
    server: ForkServer | None

    def start(self, variables: Mapping[str, str]) -> RankProcess:
        """Start a rank, in the main thread. variables: say which rank it is."""
        environment = child_environment(**variables)
        if self.server:
            call = Call(RUN_WORDS, tuple(self.words), environment, new_session=True)
            with open(os.devnull, "rb") as nothing:
                process = self.server.fork(call, (nothing.fileno(), 1, 2))
            if process:
                return process
        command = RankCommand(python_module("samecurve", *self.words, unbuffered=True), environment)
        return command.start(stdin=subprocess.DEVNULL, pipes=False)


def ask_to_leave(ranks: Sequence[RankProcess]) -> None:
    """Ask the ranks that live to save and leave."""
    for rank in ranks:
        if rank.poll() is None:
            with suppress(OSError):
                os.kill(rank.pid, signal.SIGTERM)


def kill(ranks: Sequence[RankProcess]) -> None:
    """Kill the ranks, with all that they have started."""
    for rank in ranks:
        with suppress(OSError):
            os.killpg(rank.pid, signal.SIGKILL)


def wait(ranks: Sequence[RankProcess], seconds: float) -> None:
    """Wait until the ranks have ended; kill those that have not after so many seconds."""
    until = time.monotonic() + seconds
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < until:
        time.sleep(_TICK)
    kill(ranks)
    for rank in ranks:
        rank.wait()
