"""The hosts of `samecurve train --nnodes`: how many there are, and the way to the first of them."""

import re
import socket
from contextlib import suppress
from dataclasses import dataclass

from samecurve.errors import UserError
from samecurve.launch.network import (
    Interface,
    interface_towards,
    is_own,
    parse_place,
    resolve,
)
from samecurve.worker.meeting import reach_first_host

# seconds
REACHED = 1800.0  # in which the first host must answer
_TRY = 3.0  # for one connection


@dataclass(frozen=True)
class Hosts:
    """How many hosts, where they meet, and which one this is."""

    least: int
    most: int
    host: str
    port: int
    index: int | None = None  # None: the agents number the hosts

    @property
    def may_change(self) -> bool:
        return self.least < self.most


@dataclass(frozen=True)
class Way:
    """This host's interface towards the first host; and whether this host is the first one, which
    serves the place where all meet.
    """

    interface: Interface
    is_first: bool


def read_hosts(nodes: str, rendezvous: str | None, index: int | None) -> Hosts:
    """The values of --nnodes, --rdzv and --node-rank. UserError: one is wrong, or missing."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", nodes)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        raise UserError(
            f"--nnodes {nodes}",
            "a number of hosts, as 2, or the fewest and the most, as 1:4",
            "--nnodes",
        )
    if rendezvous is None:
        raise UserError(
            f"--nnodes {nodes} needs --rdzv HOST:PORT, where the hosts meet",
            "the same on every host: a name of the first one, and a free port there",
            "--nnodes",
        )
    if index is not None and (least != most or index >= most):
        why = "the number of hosts may change" if least != most else f"it is 0 to {most - 1}"
        raise UserError(
            f"--node-rank {index} of {nodes} hosts: {why}",
            "leave --node-rank out: the hosts are numbered as they come",
            "--node-rank",
        )
    return Hosts(least, most, *parse_place(rendezvous), index)


def way_to(hosts: Hosts) -> Way:
    """The way to the first host. Any other host waits here until the first one answers.

    UserError: the name is not known, or no network leads there. RunError: nobody answers.
    """
    address = resolve(hosts.host)
    interface = interface_towards(address)
    if is_own(address):
        # where it answers, another agent of this machine serves it
        return Way(interface, is_first=not _answers(address, hosts.port))
    reach_first_host(address, hosts.port, f"{hosts.host}:{hosts.port} ({address})")
    return Way(interface, is_first=False)


def _answers(address: str, port: int) -> bool:
    with suppress(OSError):
        socket.create_connection((address, port), timeout=_TRY).close()
        return True
    return False
