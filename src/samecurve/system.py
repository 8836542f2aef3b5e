"""Small operating-system helpers.

Files written whole, processes that end with their parents, the cache, and how this copy of the
program was installed.
"""

import ctypes
import errno
import fcntl
import json
import os
import shlex
import shutil
import signal
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import metadata
from importlib.util import find_spec
from io import RawIOBase
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlparse

# Sent by the launcher where the control file can't be written, or is not its own.
STOP_SIGNAL = signal.SIGUSR1
LAUNCHER = "SAMECURVE_LAUNCHER"
PROGRESS = "SAMECURVE_PROGRESS"  # the file in which a process says how far it has come
_READ_AT_ONCE = 1 << 20  # bytes


def regular_only(path: str, flags: int, mode: int = 0o644) -> int:
    """The opener of a file in a directory that may have come from elsewhere.

    It follows no link, and waits for nobody at a FIFO: open(path, "rb", opener=regular_only).

    OSError: it is a link, a FIFO, a device or a directory; or it can't be opened.
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
    """Into an unbuffered file. OSError: not all of it fits.

    A disk that fills up takes what still fits and reports no error before the next write.
    """
    while data:
        data = data[file.write(data) or 0 :]


def read_file_bytes(path: Path, most: int) -> bytes:
    """The whole of an ordinary file.

    OSError: as regular_only(), or it has more than `most` bytes.
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
    """Whole or not at all, and on disk when this returns."""
    scratch = path.with_name(f"{path.name}.{os.getpid()}.part")
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
    """A scratch directory, to be filled, which becomes `home` at the end of the block.

    So a kill, or two processes at once, leave it whole or absent.
    """
    home.parent.mkdir(parents=True, exist_ok=True)
    scratch = home.with_name(f"{home.name}.{os.getpid()}")
    scratch.mkdir(exist_ok=True)
    try:
        yield scratch
        try:
            scratch.rename(home)
        except OSError:
            if not home.is_dir():  # else another process was faster
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def one_at_a_time(lock: Path) -> Iterator[bool]:
    """One process at a time is in the block; False where the file system can't lock."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with open(lock, "w") as file:
        locked = False
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
            locked = True
        try:
            yield locked
        finally:
            with suppress(OSError):
                lock.unlink()


def show_progress(line: str, environment: Mapping[str, str] = os.environ) -> None:
    """A line on how far something long has come, for who waits for it.

    In the file that SAMECURVE_PROGRESS names, which the process that started this one reads and
    shows; on stderr where there is none.
    """
    path = environment.get(PROGRESS)
    if path is None:
        print(line, file=sys.stderr, flush=True)
        return
    with open(path, "a") as file:
        file.write(f"{line}\n")


_GO_ON = "run the same command again: it goes on from the last save"


def explain_os_error(error: OSError, path: Path, then: str = _GO_ON) -> tuple[str, str]:
    """Why a file or directory of ours can't be written or read, and what helps.

    path: that file or directory
    then: what to do once that is mended
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
    known = {
        errno.ENOSPC: ("no space is left on its disk", "free some space (`df -h`)"),
        errno.EDQUOT: ("the quota of its disk is used up", "free some space (`quota`)"),
        errno.EROFS: (
            "its file system is read-only; a disk with errors becomes so",
            "`dmesg` says why; mount it writable again",
        ),
        errno.EACCES: ("permission denied", "mend its permissions"),
        errno.EPERM: ("operation not permitted", "mend its permissions"),
        errno.EIO: ("its disk has failed", "`dmesg` says more; mend it, or copy the run elsewhere"),
        errno.EMFILE: ("this process may open no more files", "`ulimit -n 65536`"),
    }
    cause, remedy = known.get(error.errno or 0, (error.strerror or str(error), "mend that"))
    return f"{path}: {cause}", f"{remedy}, and {then}"


def _lacks_inodes(place: Path) -> bool:
    try:
        status = os.statvfs(place)
    except OSError:
        return False
    return status.f_files > 0 and status.f_favail == 0


@contextmanager
def not_hiding(failure: BaseException) -> Iterator[None]:
    """In what handles a failure: what fails here, too, is noted on it and does not replace it."""
    try:
        yield
    except Exception as another:
        failure.add_note(f"and, while that was handled: {type(another).__name__}: {another}")


@contextmanager
def closing_all(*closers: Callable[[], object]) -> Iterator[None]:
    """All are called after the block, in this order, whatever fails; the first failure is raised,
    the block's before theirs.
    """
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failure = error
    for close in closers:
        try:
            close()
        except Exception as error:
            if failure is None:
                failure = error
            else:
                failure.add_note(f"and, at the end: {type(error).__name__}: {error}")
    if failure is not None:
        raise failure


def cache_home(environment: Mapping[str, str] = os.environ) -> Path:
    """Where token files and facts are kept: SAMECURVE_CACHE, else the user's cache directory."""
    if environment.get("SAMECURVE_CACHE"):
        return Path(environment["SAMECURVE_CACHE"])
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "samecurve"


def child_environment(**variables: str) -> dict[str, str]:
    """This process's environment with these variables set, for a child process."""
    return {**os.environ, **variables}


def replace_environment(environment: Mapping[str, str]) -> None:
    """Give this process another environment, as if it had been started with it."""
    os.environ.clear()
    os.environ.update(environment)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, as the command line hears it where no run is under way that could save."""


def is_ctrl_c(error: BaseException) -> bool:
    """Whether somebody pressed it; else a user's own code has raised a KeyboardInterrupt."""
    if isinstance(error, Interrupted):
        return True
    heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return isinstance(error, KeyboardInterrupt) and heard


def die_with(parent: int, by: int = signal.SIGKILL) -> None:
    """Let the system end this process, by a signal, when its parent ends, even by kill -9.

    Linux only; elsewhere nothing happens.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, by)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


def let_threads_wait() -> None:
    """A library's idle threads soon sleep, in this process and those that it starts, unless the
    user has set OMP_WAIT_POLICY or GOMP_SPINCOUNT. Before torch is imported.

    By themselves they spin 300,000 turns, which cost a small model's step 76 ms beside other
    programs on the same cores, 7 on a quiet machine. At once asleep: 16 and 17; as set here: 28 and
    8. libgomp, which torch's wheels bring, goes by the turns; other libraries by the policy.
    Both cases: docs/benchmarks.md.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "3000"}


def give_back_blocks_from(size: int) -> None:
    """Blocks of memory of at least so many bytes go back to the system once they are freed.

    As glibc's MALLOC_MMAP_THRESHOLD_, which stays where a user has set it; elsewhere nothing
    happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        mallopt(-3, size)  # M_MMAP_THRESHOLD


def install_command(extra: str) -> str:
    """The command that adds an extra (jax, report, ...) to this very copy of the program.

    A checkout is named by its path. An installed wheel is named by name: pip then takes the copy
    that is there, and fetches only what the extra lists.
    """
    source = checkout()
    if source:
        return pip_command("install", "-e", f"{source}[{extra}]")
    return pip_command("install", f"samecurve[{extra}]")


def checkout() -> Path | None:
    """The directory with pyproject.toml that this copy runs from, if it runs from one."""
    root = Path(__file__).resolve().parents[2]
    if (root / "pyproject.toml").is_file():
        return root
    try:
        origin = metadata.distribution("samecurve").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    url = urlparse(json.loads(origin)["url"]) if origin else None
    if url is None or url.scheme != "file":
        return None
    directory = Path(unquote(url.path))  # `pip install DIRECTORY`, without -e
    return directory if (directory / "pyproject.toml").is_file() else None


def pip_command(action: Literal["install", "uninstall"], *requirements: str) -> str:
    """pip's command for this Python, or uv's where that is what installs here."""
    words = " ".join(map(shlex.quote, requirements))
    if find_spec("pip") is None and shutil.which("uv"):
        return f"uv pip {action} --python {shlex.quote(sys.executable)} {words}"
    yes = " -y" if action == "uninstall" else ""
    return f"{_pip()} {action}{yes} {words}"


def installed_by_conda(package: str) -> bool:
    try:
        installer = metadata.distribution(package).read_text("INSTALLER") or ""
    except metadata.PackageNotFoundError:
        return False
    return installer.strip() == "conda"


def _pip() -> str:
    """`pip` where that word means this Python's, else this Python by its path."""
    on_path = shutil.which("pip")
    if on_path and Path(on_path).parent == Path(sys.executable).parent:
        return "pip"
    return f"{shlex.quote(sys.executable)} -m pip"
