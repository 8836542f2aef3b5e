"""A script that ignores its rank, noticed from outside: ranks that never meet, ranks that share one
GPU, GPUs that nobody uses. Each is told once.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import psutil

EVERY = 5.0  # seconds between two looks at the GPUs; only what two of them agree on is told
LONG = 60.0  # seconds after which ranks that have not met are worth a word
LONE = "each of them trains by itself, and what they save may overwrite each other"
REMEDY = (
    "torch.distributed.init_process_group() and DistributedDataParallel in the script, or samecurve"
    " run --nproc 1"
)


class Notices:
    """Of one world.

    holders: the processes on each GPU, read anew. port: where the ranks meet. say: one warning.
    """

    def __init__(
        self,
        world: int,
        port: int,
        gpus: int,
        holders: Callable[[], Sequence[set[int]]],
        say: Callable[[str], None],
        long: float = LONG,
        every: float = EVERY,
    ) -> None:
        self._world, self._port, self._holders, self._say = world, port, holders, say
        now = time.monotonic()
        self._meet: float | None = now + long if world > 1 else None
        self._look: float | None = now + every if gpus > 1 else None
        self._every, self._last = every, ""
        self._told_lone = False

    def tick(self, pids: Mapping[int, int]) -> None:
        now = time.monotonic()
        if self._look is not None and now > self._look and len(pids) == self._world:
            self._look = now + self._every
            self._gpus(pids)
        if self._meet is not None and now > self._meet and len(pids) == self._world:
            self._meet = None
            if not _met(pids.values(), self._port):
                self._told_lone = True
                self._say(
                    f"{LONG:g} s, and none of the {self._world} ranks has joined a process group"
                    f" yet: if they never do, {LONE}; remedy: {REMEDY}"
                )

    def ended(self, words: Sequence[Mapping[str, Any]]) -> None:
        """All ranks ended well. words: what they left."""
        if (
            self._world > 1
            and words
            and not any(word.get("joined") for word in words)
            and not self._told_lone
        ):
            why = "" if any(word.get("torch") for word in words) else " (nor imported torch)"
            self._say(
                f"none of the {self._world} ranks has joined a process group{why}: {LONE}; remedy:"
                f" {REMEDY}"
            )

    def _gpus(self, pids: Mapping[int, int]) -> None:
        found = verdict([_family(pid) for pid in pids.values()], self._holders())
        if found is not None and found == self._last:
            self._look = None
            if found:
                self._say(found)
        self._last = found if found is not None else ""


def verdict(ranks: Sequence[set[int]], gpus: Sequence[set[int]]) -> str | None:
    """What to say of it; "": all is as it should be; None: not to be told yet.

    ranks: process ids of each, with its children's.
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


def _family(pid: int) -> set[int]:
    with suppress(psutil.Error):
        return {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
    return {pid}


def _met(pids: Iterable[int], port: int) -> bool:
    """Whether a rank listens, as its store and Gloo or NCCL do, or is connected to where they meet.

    True where that can't be told.
    """
    with suppress(psutil.Error, OSError):
        mine = set(pids)
        return any(
            one.pid in mine
            and (one.status == psutil.CONN_LISTEN or (one.raddr and one.raddr.port == port))
            for one in psutil.net_connections("tcp")
        )
    return True
