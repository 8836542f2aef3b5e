"""The hosts that torch's rendezvous knows, which torch's handler keeps to itself.

An agent writes a sign of life every few seconds; torch leaves out a host whose last sign is too old
whenever it reads the rendezvous again, but tells its agents nothing of it.
"""

import time
from collections.abc import Mapping

from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    _RendezvousExitOp,
)

_LEAVE = 5.0  # seconds in which the others hear that a host leaves


def present_hosts(handler: RendezvousHandler) -> Mapping[object, str] | None:
    """The addresses of the hosts of this round, as this host last read them; each by its agent.

    None: the hosts have fixed numbers, and no signs of life.
    """
    if not isinstance(handler, DynamicRendezvousHandler):
        return None
    return {agent: agent.addr for agent in handler._state_holder.state.participants}  # noqa: SLF001


def leave_hosts(handler: RendezvousHandler) -> None:
    """Take this host out of the round, so that the others need not wait for its signs of life."""
    if isinstance(handler, DynamicRendezvousHandler):
        handler._stop_heartbeats()  # noqa: SLF001
        handler._op_executor.run(_RendezvousExitOp(), time.monotonic() + _LEAVE)  # noqa: SLF001
