"""The rank that this process is when torchrun, Slurm or the user started it: read from the
environment. Nothing is started here.
"""

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from samecurve.errors import UserError

if TYPE_CHECKING:  # neither torch nor numpy is imported for a config error
    from samecurve.core.protocols import Rank

_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SLURM = (
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
    "SLURM_STEP_NUM_NODES",
    "SLURM_STEP_NODELIST",
    "SLURM_JOB_ID",
)
ENDED = "SAMECURVE_ENDED"  # a file in which a rank leaves its agent the code it ended for good with
FACTS = "SAMECURVE_FACTS"  # a directory in which a launcher keeps the facts for its next start
LEAVES = "SAMECURVE_LEAVES"  # a host may leave, and the others go on without it
GROUP = "SAMECURVE_GROUP"  # names the agents that start ranks together, for the run's lock
_LEAVE = "SAMECURVE_LEAVE_SECONDS"
_LEAVE_SECONDS = 20.0  # torchrun kills its ranks 30 s after its SIGTERM
_FIRST_PORT, _PORTS = 20_000, 10_000  # one a Slurm job, so that two on a host don't meet


def started(environment: Mapping[str, str]) -> bool:
    """Whether this process was started as one of several.

    torchrun does so, Slurm with several tasks, or a user who sets torch's variables.
    """
    slurm_tasks = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
    world = environment.get("WORLD_SIZE", "")
    by_variables = "RANK" in environment and world.isdigit() and int(world) > 1
    return "TORCHELASTIC_RUN_ID" in environment or slurm_tasks > 1 or by_variables


def alone(verb: str) -> None:
    """Check that this process is alone, since the verb starts ranks. UserError: it is not alone."""
    if started(os.environ):
        raise UserError(
            f"{verb} starts its ranks itself", "run it by itself, not under torchrun or srun", verb
        )


def rank_from(environment: Mapping[str, str]) -> "Rank":
    """The rank in torchrun's or our launcher's variables. UserError: a variable is missing."""
    from samecurve.core.protocols import Rank

    missing = [name for name in _NEEDED if name not in environment]
    if missing:
        raise UserError(
            f"started as one of several ranks, but {', '.join(missing)} is not set",
            "start it with torchrun --nproc_per_node=N -m samecurve train ..., or set them all; a"
            " process that is alone has no RANK: `unset RANK WORLD_SIZE`",
            "environment",
        )
    world, local_world = int(environment["WORLD_SIZE"]), int(environment["LOCAL_WORLD_SIZE"])
    return Rank(
        int(environment["RANK"]), int(environment["LOCAL_RANK"]), world, world // local_world
    )


def from_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """torchrun's variables for a task of `srun`.

    UserError: a variable is missing, or the tasks are spread unevenly.
    """
    missing = [name for name in _SLURM if name not in environment]
    if missing:
        raise UserError(
            f"started by Slurm, but {', '.join(missing)} is not set",
            "start it with srun, inside a job",
            "environment",
        )
    tasks = int(environment["SLURM_STEP_NUM_TASKS"])
    nodes = int(environment["SLURM_STEP_NUM_NODES"])
    if tasks % nodes:
        raise UserError(
            f"{tasks} tasks on {nodes} nodes",
            "as many on each: srun --ntasks-per-node=N",
            "environment",
        )
    return rank_environment(
        rank=int(environment["SLURM_PROCID"]),
        world_size=tasks,
        local_rank=int(environment["SLURM_LOCALID"]),
        local_world_size=tasks // nodes,
        host=first_host(environment["SLURM_STEP_NODELIST"]),
        port=_FIRST_PORT + int(environment["SLURM_JOB_ID"]) % _PORTS,
    )


def first_host(nodes: str) -> str:
    """'gpu[07-09,12],cpu1' -> 'gpu07', as Slurm writes lists of hosts."""
    first = re.match(r"([^,\[]+)(?:\[([^,\-\]]+)[^\]]*\]([^,]*))?", nodes)
    if first is None:
        return nodes
    return "".join(part or "" for part in first.groups())


def rank_environment(
    *, rank: int, world_size: int, local_rank: int, local_world_size: int, host: str, port: int
) -> dict[str, str]:
    """The variables of a rank, as torchrun sets them. host, port: where the ranks meet."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }


def local_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The variables of a rank where all ranks are on this machine."""
    return rank_environment(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        host="127.0.0.1",
        port=port,
    )


def is_first(rank: "Rank") -> bool:
    """Whether this rank prepares the run, keeps the journal and speaks for all ranks."""
    return rank.index == 0


def is_first_of_host(rank: "Rank") -> bool:
    return rank.local == 0


def leave_seconds(environment: Mapping[str, str]) -> float:
    """Seconds that a rank may take to leave once a signal has asked it: the last step and the save.

    UserError: the variable is no number of seconds.
    """
    text = environment.get(_LEAVE, "")
    if not text:
        return _LEAVE_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise UserError(
            f"{_LEAVE} is {text!r}",
            f"a number of seconds, shorter than what the engine grants; unset: {_LEAVE_SECONDS:g}",
            "environment",
        )
    return seconds
