"""Checks that ranks which torchrun, Slurm or the user started run one program with one config.

Before anything is prepared, the first rank publishes its versions, config and code. Each other rank
compares them with its own, and answers with the differences in words, or with an empty text. It
also tells which cores it may use.
"""

import json
import platform
import socket
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING

import samecurve
from samecurve.core.config import flatten
from samecurve.core.config.loading import LoadedConfig
from samecurve.core.protocols import Rank
from samecurve.errors import SamecurveError, UserError
from samecurve.probe import allowed_cores, cpu_cores
from samecurve.tasks.user_class import code_of, identity_of, place_of
from samecurve.units import counted
from samecurve.worker.meeting import answer, ask_ranks, hear

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_IDENTITY = "samecurve/identity"  # the first rank's identity
_OF_HOSTS = "samecurve/identity of hosts"  # that of the first host
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


def check_ranks_agree(store: "Store", rank: Rank, loaded: LoadedConfig) -> int:
    """Ask the other ranks, as the first one, whether they run the same.

    Returns the cores that the ranks of this host may use together: a launcher may bind each rank to
    cores of its own, as Slurm does. What is planned for several ranks must be what is planned for
    one that has all these cores.

    UserError: a rank runs another config or code. RunError: some ranks never came.
    """
    others = [index for index in range(rank.world_size) if index != rank.index]
    answers = ask_ranks(store, _IDENTITY, identity(loaded), others, rank.world_size)
    different = {index: said["differs"] for index, said in answers.items() if said["differs"]}
    if different:
        index, text = next(iter(different.items()))
        count = len(different) - 1
        more = f" (and {counted(count, 'more rank')})" if count else ""
        raise UserError(
            f"rank {index}{more} runs something else than rank {rank.index}: {text}",
            "the same command, files and installed versions for every rank",
            "environment",
        )
    here, numbers = socket.gethostname(), allowed_cores()
    neighbours = [said["cores"] for said in answers.values() if said["host"] == here]
    return cpu_cores(numbers.union(*neighbours))


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
    topic, first = hear(store, rank, [_IDENTITY, left_key])
    if topic == left_key:
        return
    try:
        text = differences(first, identity(read()))
    except (SamecurveError, OSError) as error:
        text = f"its config can't be read: {error}".splitlines()[0]
    cores = sorted(allowed_cores())
    answer(store, _IDENTITY, rank, {"differs": text, "host": socket.gethostname(), "cores": cores})


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
