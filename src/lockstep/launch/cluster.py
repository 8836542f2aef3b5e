"""Who this process is, when somebody else started it: read from the environment, nothing is started here."""

from collections.abc import Mapping

from lockstep.core.protocols import Rank
from lockstep.errors import UserError

_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def rank_from(environment: Mapping[str, str]) -> Rank:
    """The rank that torchrun, or our launcher, gave. UserError: a half-set environment, or several machines."""
    missing = [name for name in _NEEDED if name not in environment]
    if missing:
        raise UserError(f"started by torchrun, but {', '.join(missing)} is not set", "start it with torchrun --nproc_per_node=N -m lockstep train ...", "environment")
    world, local_world = int(environment["WORLD_SIZE"]), int(environment["LOCAL_WORLD_SIZE"])
    if world != local_world:
        raise UserError(f"{world} ranks on several machines: not in this version", "torchrun --nproc_per_node=N on one machine", "torchrun")
    return Rank(int(environment["RANK"]), int(environment["LOCAL_RANK"]), world)
