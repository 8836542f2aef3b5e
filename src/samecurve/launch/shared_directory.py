"""Checks that several hosts see one run directory: the first rank leaves a word there, which the
first rank of each other host must find.
"""

import socket
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from samecurve.core.protocols import Rank
from samecurve.errors import UserError
from samecurve.run.directory import Run
from samecurve.worker.meeting import answer, ask_ranks

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

SHARED = "samecurve/place"  # the run's directory, and the word that is left there
_LATE = 20.0  # seconds in which a network file system shows what another host has written


def check_shared(store: "Store", rank: Rank, run: Run) -> None:
    """Ask all other hosts, as the first rank. UserError: a host does not see the directory."""
    word = uuid.uuid4().hex
    place = _word_of(run)
    place.write_text(word)
    local = rank.world_size // rank.hosts
    others = [index for index in range(0, rank.world_size, local) if index != rank.index]
    question = {"home": str(run.home), "word": word}
    answers = ask_ranks(store, SHARED, question, others, rank.world_size)
    place.unlink()
    blind = [host for host in answers.values() if host]
    if blind:
        more = f", nor do {len(blind) - 1} more" if len(blind) > 1 else ""
        raise UserError(
            f"{blind[0]} does not see what {socket.gethostname()} writes into {run.home}{more}",
            "--save-dir DIR on a file system that all hosts share, under the same path on each",
            "--save-dir",
        )


def answer_shared(store: "Store", rank: Rank, place: Mapping[str, str]) -> None:
    """Answer the first rank, as the first rank of another host.

    The answer is this host's name if it does not see the directory, else empty.

    place: what the first rank has asked
    """
    path = _word_of(Run(Path(place["home"])))
    until = time.monotonic() + _LATE
    seen = False
    while not seen and time.monotonic() < until:
        with suppress(OSError):
            seen = path.read_text() == place["word"]
        time.sleep(0.05)
    answer(store, SHARED, rank, "" if seen else socket.gethostname())


def _word_of(run: Run) -> Path:
    return run.logs / "shared-word"
