"""The network between hosts: where their ranks meet, and which interface leads there."""

import socket
from collections.abc import MutableMapping
from dataclasses import dataclass

import psutil

from samecurve.errors import UserError

_HOST = (
    "a name or address of the first host that all others reach, and a free port there: node1:29500"
)


@dataclass(frozen=True)
class Interface:
    """A network interface of this host, and its address."""

    name: str
    address: str


def parse_place(text: str) -> tuple[str, int]:
    """'node1:29500' -> its name and port. UserError: it has another form."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(f"--rdzv {text} is not HOST:PORT", _HOST, "--rdzv")
    return host.removeprefix("[").removesuffix("]"), int(port)


def resolve(host: str) -> str:
    """The address of a host. UserError: nobody knows its name."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise UserError(
            f"--rdzv: this host ({socket.gethostname()}) does not know the name {host}:"
            f" {error.strerror or error}",
            "the first host's address instead, or a line for it in /etc/hosts",
            "--rdzv",
        ) from None


def interface_towards(address: str) -> Interface:
    """This host's interface on the way to an address. UserError: no way leads there."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # sends nothing
            own = probe.getsockname()[0]
        except OSError as error:
            raise UserError(
                f"no network of this host ({socket.gethostname()}) leads to {address}:"
                f" {error.strerror or error}",
                "`ip route get ADDRESS` must name a way; another name of the first host for --rdzv",
                "--rdzv",
            ) from None
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == own for one in addresses):
            return Interface(name, own)
    return Interface("", own)


def use_interface(interface: Interface, environment: MutableMapping[str, str]) -> None:
    """Have Gloo and NCCL use this interface. What the user has set stays.

    Left alone, Gloo takes the interface of this host's own name, which Debian's /etc/hosts has as
    127.0.1.1; NCCL takes the first of all.
    """
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if interface.name:
            environment.setdefault(name, interface.name)


def is_own(address: str) -> bool:
    """Whether the address is one of this host's own."""
    return interface_towards(address).address == address
