"""Warnings about a script that ignores its rank: ranks that never meet, ranks that share one GPU,
GPUs that no rank uses. All of it is seen from outside the script, and each warning is given once.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import psutil

EVERY = 5.0  # seconds between two looks at the GPUs; only what two looks agree on is reported
LONG = 60.0  # seconds after which ranks that have not met are mentioned
LONE = "each of them trains by itself, and what they save may overwrite each other"
REMEDY = (
    "torch.distributed.init_process_group() and DistributedDataParallel in the script, or samecurve"
    " run --nproc 1"
)


class Notices:
    """The warnings about a group of ranks."""

    def __init__(
        self,
        world_size: int,
        *,
        port: int,
        gpus: int,
        holders: Callable[[], Sequence[set[int]]],
        say: Callable[[str], None],
        long: float = LONG,
        every: float = EVERY,
    ) -> None:
        """world_size: the number of ranks.

        port: where the ranks meet.
        gpus: the number of GPUs that the ranks may use.
        holders: reads which processes use each GPU.
        say: prints a warning.
        """
        self._world_size, self._port, self._holders, self._say = world_size, port, holders, say
        now = time.monotonic()
        # the time of the next look; None: no more looks
        self._meeting_due = now + long if world_size > 1 else None
        self._gpus_due = now + every if gpus > 1 else None
        self._every, self._last_verdict = every, ""
        self._warned_of_lone_ranks = False

    def tick(self, pids: Mapping[int, int]) -> None:
        """Look at the ranks, where it is time. pids: of the ranks at work."""
        now = time.monotonic()
        if len(pids) < self._world_size:
            return
        if self._gpus_due is not None and now > self._gpus_due:
            self._gpus_due = now + self._every
            self._check_gpus(pids)
        if self._meeting_due is not None and now > self._meeting_due:
            self._meeting_due = None
            if not _have_met(pids.values(), self._port):
                self._warned_of_lone_ranks = True
                self._say(
                    f"{LONG:g} s, and none of the {self._world_size} ranks has joined a process"
                    f" group yet: if they never do, {LONE}; remedy: {REMEDY}"
                )

    def ended(self, reports: Sequence[Mapping[str, Any]]) -> None:
        """Warn of ranks that never met, after all have ended well. reports: of the ranks."""
        if self._world_size == 1 or not reports or self._warned_of_lone_ranks:
            return
        if any(report.get("joined") for report in reports):
            return
        why = "" if any(report.get("torch") for report in reports) else " (nor imported torch)"
        self._say(
            f"none of the {self._world_size} ranks has joined a process group{why}: {LONE}; remedy:"
            f" {REMEDY}"
        )

    def _check_gpus(self, pids: Mapping[int, int]) -> None:
        """Warn once, when two looks agree."""
        text = verdict([_with_children(pid) for pid in pids.values()], self._holders())
        if text is not None and text == self._last_verdict:
            self._gpus_due = None
            if text:
                self._say(text)
        self._last_verdict = text or ""


def verdict(ranks: Sequence[set[int]], gpus: Sequence[set[int]]) -> str | None:
    """The warning about the use of the GPUs; "": nothing is wrong; None: not known yet.

    ranks: the process ids of each rank and its children.
    """
    used = [index for index, holders in enumerate(gpus) if any(one & holders for one in ranks)]
    if not used or any(all(not one & holders for holders in gpus) for one in ranks):
        return None
    if len(used) == 1 and len(ranks) > 1:
        return (
            f"all {len(ranks)} ranks use GPU {used[0]}, and the other {len(gpus) - 1} are idle;"
            ' remedy: torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before anything is on'
            " a GPU"
        )
    if len(used) == 1:
        return (
            f"the script uses GPU {used[0]} of {len(gpus)}, the others are idle; remedy: a script"
            f" for several ranks and samecurve run without --nproc 1, or --gpus {used[0]}"
        )
    return ""


def _with_children(pid: int) -> set[int]:
    with suppress(psutil.Error):
        return {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
    return {pid}


def _have_met(pids: Iterable[int], port: int) -> bool:
    """Whether a rank listens on a port, as Gloo and NCCL do, or is connected to the ranks' store.

    True where the system does not say.
    """
    with suppress(psutil.Error, OSError):
        ours = set(pids)
        connections = [each for each in psutil.net_connections("tcp") if each.pid in ours]
        return any(
            each.status == psutil.CONN_LISTEN or (each.raddr and each.raddr.port == port)
            for each in connections
        )
    return True
