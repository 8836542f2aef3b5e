"""Files written whole, and read only where they are ordinary files."""

import errno
import fcntl
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import RawIOBase
from pathlib import Path
from secrets import token_hex
from typing import TextIO

_READ_AT_ONCE = 1 << 20  # bytes
_SCRATCH = ".part"
# scratch directories, and those of former versions, which were named by a key and a process id
_LEFT = re.compile(r".+\.\d+\.[0-9a-f]{8}\.part|[0-9a-f]{24}\.\d+")


def regular_only(path: str, flags: int, mode: int = 0o644) -> int:
    """Open an ordinary file in a directory that may have come from elsewhere.

    For open(path, "rb", opener=regular_only). No link is followed, and a FIFO is not waited for.

    OSError: the path is a link, a FIFO, a device or a directory; or it can't be opened.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(error.errno, "it is a link, not a file", path) from None
        if error.errno == errno.ENXIO:
            raise OSError(error.errno, "it is no ordinary file", path) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no ordinary file", path)
    return descriptor


def write_all(file: RawIOBase, data: bytes) -> None:
    """Write all bytes into an unbuffered file. OSError: not all bytes fit.

    A disk that fills up takes what still fits, and reports no error before the next write.
    """
    while data:
        data = data[file.write(data) or 0 :]


def read_file_bytes(path: Path, most: int) -> bytes:
    """Read a whole ordinary file.

    OSError: as regular_only(), or the file has more than `most` bytes.
    """
    content = bytearray()
    with open(path, "rb", opener=regular_only) as file:
        # in blocks: read(most) asks for as much memory, however small the file is
        while len(content) <= most and (block := file.read(_READ_AT_ONCE)):
            content += block
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))
    return bytes(content)


def write_json(path: Path, value: object) -> None:
    """Write a file of JSON, whole or not at all. The file is on disk when this returns."""
    # containers that share a disk have equal process ids
    scratch = path.with_name(f"{path.name}.{os.getpid()}.{token_hex(4)}.part")
    with open(scratch, "w") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)


def sync_directory(path: Path) -> None:
    """Put the names in a directory on disk, so that a rename outlives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def directory_made_once(home: Path) -> Iterator[Path]:
    """Give a scratch directory to fill, which becomes `home` at the end of the block.

    After a kill, or with two processes at once, `home` is whole or absent. What killed processes
    have left beside it is removed.
    """
    home.parent.mkdir(parents=True, exist_ok=True)
    _remove_left(home)
    scratch, lock = _locked_scratch(home)
    try:
        yield scratch
        try:
            scratch.rename(home)
        except OSError:
            if not home.is_dir():  # else another process was faster
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(lock)


def _locked_scratch(home: Path) -> tuple[Path, int]:
    """A new directory that no other process has, and the open descriptor that locks it."""
    while True:
        # containers that share a disk have equal process ids
        scratch = home.with_name(f"{home.name}.{os.getpid()}.{token_hex(4)}{_SCRATCH}")
        scratch.mkdir()
        descriptor = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with suppress(OSError):  # some file systems have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if scratch.is_dir():  # else another process took it for one that was left
            return scratch, descriptor
        os.close(descriptor)


def _remove_left(home: Path) -> None:
    """Remove scratch directories whose processes have ended: no one holds their locks."""
    for left in home.parent.glob("*.*"):
        if not _LEFT.fullmatch(left.name):
            continue
        with suppress(OSError):
            descriptor = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(descriptor)


@contextmanager
def one_at_a_time(lock: Path) -> Iterator[bool]:
    """Let one process at a time into the block. Gives False where the file system can't lock."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    file, locked = _locked_file(lock)
    with file:
        try:
            yield locked
        finally:
            with suppress(OSError):
                lock.unlink()


def _locked_file(lock: Path) -> tuple[TextIO, bool]:
    """The open file, and whether it is locked. Its last holder may have removed it meanwhile."""
    while True:
        file = open(lock, "w")  # noqa: SIM115 - the caller closes it
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            return file, False
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), lock.stat()):
                return file, True
        file.close()
