"""The addresses at which the server answers: what --host may be, and which Host names are its own.

A page of another site can have its own name resolve to this machine (DNS rebinding), and the
browser would then let it read the answers. Its name stands in the request's Host header, so only
names of this machine are answered. The port is not compared: behind `ssh -L` it is another one.
"""

import ipaddress
import re
import socket
from contextlib import suppress

import psutil

from samecurve.seam import UserError

DEFAULT_PORT = 8631
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._\-]+)(?::(\d{1,5}))?\Z")


def check_host(host: str, *, allow_remote: bool) -> None:
    """UserError: the host is not this machine alone, and the user has not allowed that."""
    if allow_remote or is_loopback(host):
        return
    raise UserError(
        f"--host {host} would let other machines reach this page, which can start programs here",
        "leave --host out, and reach the page from your machine through"
        f" `ssh -L {DEFAULT_PORT}:127.0.0.1:{DEFAULT_PORT} THIS-MACHINE`; or add --allow-remote, if"
        " you trust everybody on that network not to listen (the page is not encrypted)",
        "--host",
    )


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return False


def listen(host: str, port: int | None) -> socket.socket:
    """A socket that listens. port: 0: any free one; None: the default one, or a free one.

    UserError: the address is not this machine's, or the port is taken.
    """
    bare = host.strip("[]")
    try:
        family, _, _, _, address = socket.getaddrinfo(
            bare, port or 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError, OverflowError):
        raise UserError(
            f"--host {host} is no address of this machine", "--host 127.0.0.1", "--host"
        ) from None
    candidates = [DEFAULT_PORT, 0] if port is None else [port]
    for number in candidates:
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((address[0], number))
            bound.listen(128)
        except OSError as error:
            bound.close()
            failure = error
        else:
            return bound
    raise UserError(
        f"{host}:{port} can't be listened at: {failure.strerror}",
        "--port 0 takes a free port; the page may be open there already",
        "--port",
    ) from None


def url_host(host: str) -> str:
    """The host of the URL that is printed: a name that another machine can use, where it may."""
    bare = host.strip("[]")
    with suppress(ValueError):
        address = ipaddress.ip_address(bare)
        if address.is_unspecified:
            return socket.gethostname()
        return f"[{bare}]" if address.version == 6 else bare
    return bare


def own_names(host: str, *, allow_remote: bool) -> frozenset[str]:
    """The names, in lower case, that a Host header may have."""
    names = {*_LOOPBACK_NAMES, url_host(host).lower()}
    if allow_remote:
        names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
        for addresses in psutil.net_if_addrs().values():
            for entry in addresses:
                if entry.family == socket.AF_INET:
                    names.add(entry.address)
                elif entry.family == socket.AF_INET6:
                    names.add(f"[{entry.address.partition('%')[0].lower()}]")
    return frozenset(names)


def host_name(header: str) -> str | None:
    """The name in a Host header, in lower case and without the port. None: it is no host."""
    match = _HOST.match(header)
    return match[1].lower() if match else None
