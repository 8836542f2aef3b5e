"""Checks that ranks which torchrun, Slurm or the user started run one program with one config.

Before anything is prepared, the first rank publishes its versions, config and code. Each other rank
compares them with its own, and answers with the differences in words, or with an empty text. It
also tells which cores it may use.
"""

import json
import platform
import socket
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING

import samecurve
from samecurve.core.config.loading import LoadedConfig
from samecurve.core.config.section import flatten
from samecurve.core.protocols import Rank
from samecurve.errors import RunError, SamecurveError, UserError
from samecurve.probe import allowed_cores, cpu_cores
from samecurve.tasks.user_class.class_place import code_of, identity_of, place_of
from samecurve.units import counted
from samecurve.worker.meeting import pace, wait_for_ranks

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_IDENTITY = "samecurve/identity"  # the first rank's identity
_OF_HOSTS = "samecurve/identity of hosts"  # that of the first host
_ANSWER = "samecurve/answer"  # another rank's answer; its number follows
_CORES = "samecurve/cores"  # another rank's host and the cores it may use; its number follows
_COME = 1800.0  # seconds in which the first rank must say what it runs
_SHOWN = 4  # differences of one rank that are named
# config that only the first rank reads, or that may differ between hosts
_FREE = ("devices.", "track.")


def identity(loaded: LoadedConfig) -> dict[str, str]:
    """The versions, config and code that a rank runs, as texts by name.

    A name is a package, a config key, or a file of the user's task.
    """
    config = loaded.config
    free = (*_FREE, *(f"data.{name}" for name in config.data.indifferent))
    keys = {
        key: json.dumps(value, default=str)
        for key, value in flatten(config).items()
        if not key.startswith(free)
    }
    place = place_of(config.task)
    task = {"task": identity_of(config.task)}
    if place:
        code, digest = code_of(place)
        task[code] = digest[:12]
    return {
        "samecurve": samecurve.__version__,
        "torch": version("torch"),
        "python": platform.python_version(),
        **task,
        **{key: text for key, text in keys.items() if key != "task"},
    }


def check_ranks_agree(store: "Store", rank: Rank, loaded: LoadedConfig) -> None:
    """Wait, as the first rank, for the other ranks' answers.

    UserError: a rank runs another config or code. RunError: some ranks never came.
    """
    store.set(_IDENTITY, json.dumps(identity(loaded)))
    others = [index for index in range(rank.world_size) if index != rank.index]
    wait_for_ranks(store, lambda index: f"{_ANSWER}/{index}", others, rank.world_size)
    texts = store.multi_get([f"{_ANSWER}/{index}" for index in others]) if others else []
    answers = {index: text.decode() for index, text in zip(others, texts, strict=True)}
    different = {index: text for index, text in sorted(answers.items()) if text}
    if different:
        index, text = next(iter(different.items()))
        count = len(different) - 1
        more = f" (and {counted(count, 'more rank')})" if count else ""
        raise UserError(
            f"rank {index}{more} runs something else than rank {rank.index}: {text}",
            "the same command, files and installed versions for every rank",
            "environment",
        )


def cores_of_host(store: "Store", rank: Rank) -> int:
    """The cores that the ranks of the first rank's host may use together.

    A launcher may bind each rank to cores of its own, as Slurm does. What is planned for
    several ranks must be what is planned for one that has all these cores.

    The caller has called check_ranks_agree().
    """
    others = [f"{_CORES}/{index}" for index in range(rank.world_size) if index != rank.index]
    places = [json.loads(text) for text in (store.multi_get(others) if others else [])]
    here, numbers = socket.gethostname(), allowed_cores()
    return cpu_cores(numbers.union(*(cores for host, cores in places if host == here)))


def check_host_agrees(place: "Store", loaded: LoadedConfig, ranks: int) -> None:
    """Compare what this host runs with what the first host has left at the place where they meet.

    ranks: of this host

    UserError: they differ. The other hosts have not heard of this one yet, and go on without it.
    """
    mine = {"ranks on a host": str(ranks), **identity(loaded)}
    first = json.loads(place.compare_set(_OF_HOSTS, "", json.dumps(mine)))
    if text := differences(first, mine):
        raise UserError(
            f"this host ({socket.gethostname()}) runs something else than the hosts that it would"
            f" join: {text}",
            "the same command, files and installed versions on every host; the run goes on without"
            " this one",
            "environment",
        )


def report_config(
    store: "Store", rank: Rank, read: Callable[[], LoadedConfig], left_key: str
) -> None:
    """Answer the first rank, as another rank.

    left_key: the store has this key once the first rank has left.
    """
    until = time.monotonic() + _COME
    while not store.check([_IDENTITY]):
        if store.check([left_key]):
            return
        if time.monotonic() > until:
            raise RunError(
                f"the first rank did not come within {_COME / 60:g} minutes",
                "its terminal or log says why",
                "environment",
                again=True,
            )
        time.sleep(pace(rank.world_size))
    try:
        text = differences(json.loads(store.get(_IDENTITY)), identity(read()))
    except (SamecurveError, OSError) as error:
        text = f"its config can't be read: {error}".splitlines()[0]
    cores = [socket.gethostname(), sorted(allowed_cores())]
    store.set(f"{_CORES}/{rank.index}", json.dumps(cores))
    store.set(f"{_ANSWER}/{rank.index}", text)


def differences(first: Mapping[str, str], other: Mapping[str, str]) -> str:
    """The differences in words; '' where there are none."""
    texts = [
        f"{name} {other.get(name, 'not there')} instead of {first.get(name, 'not there')}"
        for name in {**first, **other}
        if first.get(name) != other.get(name)
    ]
    if len(texts) > _SHOWN:
        texts = [*texts[:_SHOWN], f"and {len(texts) - _SHOWN} more"]
    return "; ".join(texts)
