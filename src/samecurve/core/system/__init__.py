"""Files written whole, files read only where they are ordinary ones, and the causes and remedies of
the errors that the system reports about files.
"""

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

# the folders of this program's own code
KERNEL = Path(__file__).parents[2]
PRODUCTS = KERNEL.with_name("samecurve_products")
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
    write_whole(path, json.dumps(value, indent=1).encode())


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all. The file is on disk when this returns."""
    # containers that share a disk have equal process ids
    scratch = path.with_name(f"{path.name}.{os.getpid()}.{token_hex(4)}.part")
    try:
        with open(scratch, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except BaseException:  # a full disk, a signal
        scratch.unlink(missing_ok=True)
        raise


def write_new(path: Path, content: bytes) -> None:
    """Write a new file, whole or not at all. FileExistsError: there is one, which stays."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.{token_hex(4)}.part")
    try:
        scratch.write_bytes(content)
        os.link(scratch, path)  # unlike a rename, never over another file
    finally:
        scratch.unlink(missing_ok=True)


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


_GO_ON = "run the same command again: it goes on from the last save"


def explain_os_error(error: OSError, path: Path, then: str = _GO_ON) -> tuple[str, str]:
    """Explain why a file or directory can't be written or read. Returns the cause and the remedy.

    path: the file or directory
    then: what to do once the cause is gone
    """
    place = path.absolute()
    while not os.path.lexists(place):
        missing, place = place, place.parent
    if error.errno == errno.ENOSPC and _lacks_inodes(place):
        return (
            f"no inode is left on the file system of {place}: it may hold no more files",
            f"remove many small files there (`df -i`), and {then}",
        )
    if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ESTALE} and place != path.absolute():
        return (
            f"{missing} is missing: removed or renamed, or its disk is not mounted",
            f"put it back where it was, and {then} (what was moved as a whole: under its new name)",
        )
    permissions = f"give yourself the right to it (`ls -ld {place}`, chmod, chown)"
    known = {
        errno.EISDIR: ("it is a directory, where a file is needed", "remove or rename it"),
        errno.ENOTDIR: ("a file lies where a directory is needed", "remove or rename it"),
        errno.EEXIST: ("it exists already", "remove or rename it"),
        errno.ENOSPC: ("no space is left on its disk", "free some space (`df -h`)"),
        errno.EDQUOT: ("the quota of its disk is used up", "free some space (`quota`)"),
        errno.EROFS: (
            "its file system is read-only; a disk with errors becomes so",
            "`dmesg` says why; mount it writable again",
        ),
        errno.EACCES: ("permission denied", permissions),
        errno.EPERM: ("operation not permitted", permissions),
        errno.EIO: ("its disk has failed", "`dmesg` says more; copy the run to another disk"),
        errno.EMFILE: ("this process may open no more files", "`ulimit -n 65536`"),
    }
    other = (error.strerror or str(error), f"see what `ls -ld {place}` and `dmesg` say of it")
    cause, remedy = known.get(error.errno or 0, other)
    return f"{path}: {cause}", f"{remedy}, and {then}"


def _lacks_inodes(place: Path) -> bool:
    try:
        status = os.statvfs(place)
    except OSError:
        return False
    return status.f_files > 0 and status.f_favail == 0
