"""Serve the page: one process that prints one address, until a signal ends it.

Runs and jobs are processes of their own: the end of the server, however it comes, ends none.
"""

import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

import uvicorn

from samecurve.core.events import stop_signals
from samecurve.seam import echo
from samecurve_products.page.app import make_app
from samecurve_products.page.guard import Guard
from samecurve_products.page.hosts import check_host, listen, own_names, url_host
from samecurve_products.page.roots import Root
from samecurve_products.page.session import Session
from samecurve_products.page.site import Site

_LEAVE_SECONDS = 2  # for answers under way, when the server ends


class _Server(uvicorn.Server):
    """uvicorn's server, whose signals are handled here: it ends no process that it has started."""

    received: int | None = None  # the number of the first signal

    def __init__(self, config: uvicorn.Config, site: Site) -> None:
        super().__init__(config)
        self._site = site

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End what answers under way may wait for, and then wait for them."""
        self._site.end()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # ending_at_signals() does it

    @contextmanager
    def ending_at_signals(self) -> Iterator[None]:
        """End the server at the first signal, and at the second without waiting for answers."""

        def stop(number: int, _frame: FrameType | None) -> None:
            self.received = self.received or number
            self.force_exit = self.should_exit
            self.should_exit = True

        old = {number: signal.signal(number, stop) for number in stop_signals()}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)


def serve(
    directories: Sequence[Path],
    *,
    host: str,
    port: int | None,
    allow_remote: bool,
    say: Callable[[str], None] = echo,
) -> NoReturn:
    """Serve until a signal comes; then leave with 128 + its number.

    port: 0: any free one; None: the default one, or a free one
    say: is called with the lines for the terminal

    UserError: a directory is not there, or the host or port can't be served.
    """
    check_host(host, allow_remote=allow_remote)
    roots = [Root.of(directory) for directory in directories]
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
    with listen(host, port) as bound:
        code = _serve(bound, roots, host, say, allow_remote=allow_remote)
    # no interpreter's shutdown: threads may wait for a disk, and nothing is left to be written
    os._exit(code)


def _serve(
    bound: socket.socket,
    roots: Sequence[Root],
    host: str,
    say: Callable[[str], None],
    *,
    allow_remote: bool,
) -> int:
    """Returns the exit code."""
    port = bound.getsockname()[1]
    session = Session(port)
    site = Site(roots)
    guard = Guard(make_app(site), session, own_names(host, allow_remote=allow_remote))
    server = _Server(server_config(guard), site)
    with server.ending_at_signals():
        site.begin()
        say(f"Samecurve: http://{url_host(host)}:{port}/?token={session.token}")
        say("Ctrl-C ends this server; runs and jobs go on.")
        server.run(sockets=[bound])
        say("the server has ended; runs and jobs go on")
    return 128 + (server.received or signal.SIGTERM)


def server_config(guard: Guard) -> uvicorn.Config:
    """How uvicorn serves the page."""
    return uvicorn.Config(
        guard,
        # serve() has set logging up; doing so again closes the streams of other handlers
        log_config=None,
        access_log=False,  # its lines would hold the token
        log_level="error",  # its warnings are about requests of strangers, such as a websocket
        server_header=False,
        lifespan="off",
        ws="none",
        proxy_headers=False,
        timeout_graceful_shutdown=_LEAVE_SECONDS,
    )
