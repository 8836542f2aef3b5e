"""The output of a script's ranks: all of it goes into a log for each rank, and a part onto the
screen, in whole lines, each in one write.

One thread reads and writes. So lines of two ranks never mix, and a rank that prints faster than the
terminal takes it has to wait.
"""

import os
import select
import selectors
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from io import RawIOBase
from pathlib import Path
from typing import IO, Literal

from samecurve.core.system import write_all

Shown = Literal["all", "first", "files"]
_LONGEST = 1 << 20  # bytes of a line before it is shown in pieces
_READ = 1 << 16


@dataclass
class Lines:
    """Takes bytes, and gives whole lines, each with the prefix.

    A line that carriage returns rewrite is given once, as it reads at its end.
    """

    prefix: bytes
    _rest: bytes = b""

    def feed(self, data: bytes) -> bytes:
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[rest.rstrip(b"\r").rfind(b"\r") + 1 :]
        if len(self._rest) > _LONGEST:
            lines.append(self._rest)
            self._rest = b""
        texts = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines]
        return b"".join(self.prefix + text + b"\n" for text in texts)

    def end(self) -> bytes:
        """The last line, if it had no line end."""
        if not self._rest.strip():
            return b""
        return self.feed(b"\n")


@dataclass
class _Stream:
    rank: int
    screen: int  # the file descriptor: 1 or 2
    lines: Lines | None  # shown on the screen line by line
    raw: bool  # shown on the screen as it is
    # the line that has not ended yet: in the log, the rank's other stream must not cut it
    tail: bytes = b""


@dataclass
class Outputs:
    """The output of a group of ranks."""

    logs: Path
    shown: Shown  # all ranks' lines, the first rank's bytes, or nothing
    world_size: int
    lost: dict[int, str] = field(default_factory=dict)  # rank -> why its log ends early
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _logs: dict[int, RawIOBase] = field(default_factory=dict)

    def add(self, rank: int, streams: Mapping[int, IO[bytes]]) -> None:
        """Take the output of a rank. streams: by file descriptor on the screen.

        The first rank is the one that is added first.
        """
        is_first = not self._logs
        # open as long as the rank prints
        self._logs[rank] = open(self.log(rank), "wb", buffering=0)  # noqa: SIM115
        raw = is_first and (self.shown == "first" or (self.shown == "all" and self.world_size == 1))
        for screen, pipe in streams.items():
            os.set_blocking(pipe.fileno(), False)
            lines = Lines(f"[rank {rank}] ".encode()) if self.shown == "all" and not raw else None
            self._selector.register(pipe, selectors.EVENT_READ, _Stream(rank, screen, lines, raw))

    def log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"

    def pump(self, seconds: float) -> None:
        """Pass on what the ranks have printed. seconds: to wait at most for something."""
        ready = self._selector.select(seconds)
        for key, _ in ready:
            with suppress(BlockingIOError):
                self._pass(key.data, os.read(key.fd, _READ), key)
        if not ready:
            for key in self._selector.get_map().values():
                self._settle(key.data)

    def _pass(self, stream: _Stream, data: bytes, key: selectors.SelectorKey) -> None:
        if not data:
            self._selector.unregister(key.fileobj)
            self._settle(stream)
            if stream.lines:
                _write(stream.screen, stream.lines.end())
            return
        cut = max(data.rfind(b"\n") + 1, data.rfind(b"\r"))
        if cut > 0 or data.startswith(b"\r"):
            self.keep(stream.rank, stream.tail + data[:cut])
            stream.tail = b""
        stream.tail += data[max(cut, 0) :]
        if len(stream.tail) > _LONGEST:
            self._settle(stream)
        if stream.lines:
            _write(stream.screen, stream.lines.feed(data))
        elif stream.raw:
            _write(stream.screen, data)

    def _settle(self, stream: _Stream) -> None:
        self.keep(stream.rank, stream.tail)
        stream.tail = b""

    def keep(self, rank: int, data: bytes) -> None:
        """Write into the rank's log.

        A full disk does not end a training run: it is reported once, and the screen goes on.
        """
        if rank in self.lost or not data:
            return
        try:
            write_all(self._logs[rank], data)
        except OSError as error:
            self.lost[rank] = error.strerror or str(error)

    def drain(self, seconds: float) -> None:
        """Pass on what is left in the pipes. Children of a rank may hold some pipes open."""
        until = time.monotonic() + seconds
        while self._selector.get_map() and time.monotonic() < until:
            self.pump(0.02)

    def close(self) -> None:
        for key in list(self._selector.get_map().values()):
            stream: _Stream = key.data
            self._settle(stream)
            if stream.lines:
                with suppress(OSError):
                    _write(stream.screen, stream.lines.end())
        self._selector.close()
        for log in self._logs.values():
            log.close()


def _write(screen: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(screen, data) :]
        except BlockingIOError:  # a terminal that somebody else made so
            select.select([], [screen], [])


def say(what: str, text: str) -> None:
    """Print a line on stderr, since stdout belongs to the script."""
    sys.stdout.flush()
    print(f"{what:<6} {text}", file=sys.stderr, flush=True)
