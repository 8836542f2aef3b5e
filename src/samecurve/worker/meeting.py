"""The meeting of ranks that torchrun, Slurm or the user started: a store for their messages, which
holds no word of an earlier meeting.
"""

import json
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from samecurve.core.protocols import Rank
from samecurve.errors import RunError
from samecurve.units import show_seconds
from samecurve.worker import is_first

if TYPE_CHECKING:  # torch is imported once the config is known to be right
    from torch.distributed.distributed_c10d import Store

_JOIN = timedelta(minutes=30)
_COME = _JOIN.total_seconds()  # in which all ranks must start
_TRY = 3.0  # seconds for one connection
_SAID = 5.0  # seconds after which missing ranks are named
_PACE, _SHARE = 0.02, 0.0005  # seconds between a rank's questions, and for each rank of all
_SHOWN = 4  # missing ranks that are named
_CALL = "samecurve/call"  # the name of the first rank's meeting
_HERE = "here"  # another rank's answer; its number follows
_GO = "go"  # the first rank repeats the answer; the other rank's number follows


class Meeting:
    """This rank's way to the other ranks. The first rank serves the store, where torchrun does not.

    Making it: RunError: the first rank can't be reached. Ctrl-C ends the waiting.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._base = _open_store(rank)

    def join(self, patience: float = _COME) -> "Store":
        """Meet the other ranks. Returns a store of this meeting alone.

        patience: seconds for which the first rank waits for the others

        RunError: ranks are missing for too long.
        """
        if is_first(self._rank):
            return _call(self._base, self._rank, patience)
        return _answer(self._base, self._rank)


def rendezvous_of(store: "Store") -> "Store":
    """The part of a meeting's store that is torch's own."""
    from torch.distributed.distributed_c10d import PrefixStore

    return PrefixStore("ranks", store)


def wait_for_ranks(
    store: "Store",
    keys: Callable[[int], str],
    ranks: Iterable[int],
    world_size: int,
    patience: float = _COME,
) -> None:
    """Wait until each rank has set its key. Ranks that are waited for are named on the terminal.

    keys: the key of a rank
    patience: seconds

    RunError: some ranks never came.
    """
    missing, began, announced = list(ranks), time.monotonic(), False

    def find_missing() -> list[int]:
        return [index for index in missing if not store.check([keys(index)])]

    # all at once: asking for each of many ranks, again and again, would keep the store busy
    while missing and not store.check([keys(index) for index in missing]):
        waited = time.monotonic() - began
        if waited > _SAID and not announced and (missing := find_missing()):
            _say(_waiting(missing, world_size))
            announced = True
        if waited > patience:
            raise RunError(
                f"{world_size - len(find_missing())} of {world_size} ranks came within"
                f" {show_seconds(patience)}",
                "start the same command for every rank",
                "environment",
                again=True,
            )
        time.sleep(0.02)
    if announced:
        _say(f"all {world_size} ranks came, in {show_seconds(time.monotonic() - began)}")


def ask_ranks(
    store: "Store", topic: str, question: object, ranks: Sequence[int], world_size: int
) -> dict[int, Any]:
    """Ask ranks something, as the first one. Returns their answers by rank.

    RunError: some ranks never answered.
    """
    store.set(topic, json.dumps(question))
    wait_for_ranks(store, lambda index: f"{topic}/{index}", ranks, world_size)
    texts = store.multi_get([f"{topic}/{index}" for index in ranks]) if ranks else []
    return {index: json.loads(text) for index, text in zip(ranks, texts, strict=True)}


def answer(store: "Store", topic: str, rank: Rank, value: object) -> None:
    """Answer what the first rank has asked."""
    store.set(f"{topic}/{rank.index}", json.dumps(value))


def hear(
    store: "Store", rank: Rank, topics: Sequence[str], patience: float = _COME
) -> tuple[str, Any]:
    """Wait until the first rank says something. Returns the topic and what it says.

    topics: if several have been said, the first of them counts

    RunError: it says nothing for so many seconds.
    """
    until = time.monotonic() + patience
    while True:
        for topic in topics:
            if store.check([topic]):
                return topic, json.loads(store.get(topic))
        if time.monotonic() > until:
            raise _first_is_missing(patience)
        time.sleep(pace(rank.world_size))


def _first_is_missing(patience: float) -> RunError:
    return RunError(
        f"the first rank did not come within {show_seconds(patience)}",
        "its terminal or log says why",
        "environment",
        again=True,
    )


def _call(base: "Store", rank: Rank, patience: float) -> "Store":
    """Gather the other ranks, as the first one. Returns a store of this meeting alone.

    torchrun's store outlives a restart, with all its messages: each meeting has a name of its own,
    and a rank has come once the first rank repeats what that rank has just said.
    """
    from torch.distributed.distributed_c10d import PrefixStore

    name = uuid.uuid4().hex
    store = PrefixStore(name, base)
    others = [index for index in range(rank.world_size) if index != rank.index]
    base.set(_CALL, name)
    wait_for_ranks(store, lambda index: f"{_HERE}/{index}", others, rank.world_size, patience)
    if others:
        answers = store.multi_get([f"{_HERE}/{index}" for index in others])
        store.multi_set(  # type: ignore[attr-defined]  # torch's stubs lack it
            [f"{_GO}/{index}" for index in others], answers
        )
    return store


def _answer(base: "Store", rank: Rank) -> "Store":
    """Come to the first rank's meeting, as another rank. Returns a store of this meeting alone."""
    from torch.distributed.distributed_c10d import PrefixStore

    mine, heard, store = uuid.uuid4().hex, "", base
    until = time.monotonic() + _COME
    go = f"{_GO}/{rank.index}"
    while True:
        if base.check([_CALL]):
            name = base.get(_CALL).decode()
            if name != heard:  # it may be an earlier meeting's, whose first rank is gone
                heard, store = name, PrefixStore(name, base)
                store.set(f"{_HERE}/{rank.index}", mine)
            if store.check([go]) and store.get(go).decode() == mine:
                return store
        if time.monotonic() > until:
            raise _first_is_missing(_COME)
        time.sleep(pace(rank.world_size))


def pace(world_size: int) -> float:
    """Seconds between two questions of one rank to the first rank's store.

    All ranks together ask it no more than 2,000 times a second, however many they are.
    """
    return max(_PACE, world_size * _SHARE)


def _open_store(rank: Rank) -> "Store":
    from torch._C._distributed_c10d import TCPStore

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from torch.distributed.rendezvous import rendezvous

        store: Store = next(rendezvous("env://", timeout=_JOIN))[0]
        return store
    if not is_first(rank):
        reach_first_host(host, port, f"{host}:{port}")
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_JOIN)
    try:
        return TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=_JOIN)
    except RuntimeError as error:
        raise RunError(
            f"port {port} can't be used for the rendezvous: {str(error).splitlines()[0]}",
            "another port, the same on every host",
            "--rdzv",
            again=True,
        ) from None


def reach_first_host(host: str, port: int, shown: str) -> None:
    """Wait until the first host's port answers. A store's own tries could not be interrupted.

    shown: the place in words

    RunError: it never answers.
    """
    began, announced = time.monotonic(), False
    while True:
        try:
            socket.create_connection((host, port), timeout=_TRY).close()
            return
        except OSError as error:
            if time.monotonic() - began > _COME:
                raise RunError(
                    f"{shown} did not answer in {_COME / 60:g} minutes: {error}",
                    "the same command on the first host, and a firewall that lets this port and the"
                    " one after it through",
                    "--rdzv",
                    again=True,
                ) from None
        if not announced:
            _say(f"waiting for the first host at {shown}")
            announced = True
        time.sleep(0.5)


def _waiting(missing: Sequence[int], world_size: int) -> str:
    names = [str(index) for index in missing[:_SHOWN]]
    if len(missing) > _SHOWN:
        names.append(f"{len(missing) - _SHOWN} more")
    return (
        f"waiting for {len(missing)} of {world_size} ranks: {', '.join(names)}; each is started by"
        " the same command"
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
