"""Where the program keeps what it can make again, and how an entry shows that it is whole.

An entry is a directory with a manifest: the size of each file, and a checksum of each piece of it.
It is found again by the files, or by the content, that it is made from.

The only file below probe/ that reads the environment: a user's task may open shards, which are
indexed in the cache, before any room above has been imported.
"""

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from samecurve.core.system import directory_made_once, one_at_a_time, write_json
from samecurve.errors import UserError

MANIFEST = "checksums.json"
CHECKED = "checked"  # of an entry: a file that says that its input has been checked
_PIECE = 1 << 20  # bytes with one checksum
_AT_OPEN = 64  # pieces of a file that are checked each time, if its time has not changed


def cache_home() -> Path:
    """The directory of token files, facts and indices.

    SAMECURVE_CACHE names it; else it lies in the user's cache directory.
    """
    if named := os.environ.get("SAMECURVE_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "samecurve"


def measured_path(kind: str, key: object) -> Path:
    """The file of what was measured. key: everything known to affect it, as JSON has it"""
    text = json.dumps(key, sort_keys=True)
    return cache_home() / kind / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def cache_entry(
    home: Path, make: Callable[[Path], None], *, say: Callable[[str], None] | None = None
) -> Path:
    """An entry that is whole: made if it is absent, and made again if its bytes have changed.

    make: fills a directory. say: is called with a line about an entry that is made again. One
    process makes an entry, and others wait.
    """
    if entry_fault(home) is None:
        return home
    with one_at_a_time(home.with_suffix(".lock")):
        fault = entry_fault(home)  # another process may have made it
        if fault is None:
            return home
        if home.is_dir():
            if say is not None:
                say(f"cache  {fault}: it is made again")
            shutil.rmtree(home, ignore_errors=True)
        with directory_made_once(home) as scratch:
            make(scratch)
            _seal(scratch)
    return home


def check_once(home: Path, check: Callable[[], None]) -> None:
    """Check what an entry is made from, if its maker did not: a program before this one.

    A maker that checks writes the file CHECKED into the entry.
    """
    if not (home / CHECKED).exists():
        check()
        with suppress(OSError):  # a cache that can't be written to serves as it is
            (home / CHECKED).touch()


def entry_fault(home: Path) -> str | None:
    """Why an entry can't be used; None: it is whole.

    Small files are read whole. Of a large file some pieces are, spread over it, and all of them if
    its time has changed.
    """
    if not home.is_dir():
        return f"{home} is not there"
    try:
        manifest = json.loads((home / MANIFEST).read_text())
        files = {str(name): _read_notes(notes) for name, notes in manifest.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return f"{home / MANIFEST} is not there, or can't be read"
    touched = False
    for name, (size, time_ns, sums) in files.items():
        path = home / Path(name).name
        try:
            status = path.stat()
            same_time = status.st_mtime_ns == time_ns
            touched |= not same_time
            if status.st_size != size or not _are_whole(path, sums, every=not same_time):
                return f"{path} has changed since it was made"
        except OSError as error:
            return f"{path}: {error.strerror}"
    if touched:
        _stamp(home, files)
    return None


def _read_notes(notes: Any) -> tuple[int, int, list[int]]:
    """Size, time and checksums of a file. ValueError, TypeError: they are none."""
    size, time_ns, sums = notes
    if len(sums) != -(-size // _PIECE):
        raise ValueError("another number of pieces")
    return size, time_ns, sums


def _are_whole(path: Path, sums: list[int], *, every: bool) -> bool:
    step = 1 if every else max(1, len(sums) // _AT_OPEN)
    with open(path, "rb") as file:
        for number in range(0, len(sums), step):
            file.seek(number * _PIECE)
            if zlib.crc32(file.read(_PIECE)) != sums[number]:
                return False
    return True


def _seal(home: Path) -> None:
    """Write the manifest of a directory's files."""
    files = {}
    for path in sorted(home.iterdir()):
        status = path.stat()
        files[path.name] = (
            status.st_size,
            status.st_mtime_ns,
            list(map(zlib.crc32, _pieces(path))),
        )
    write_json(home / MANIFEST, files)


def _pieces(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            yield piece


def _stamp(home: Path, files: Mapping[str, tuple[int, int, list[int]]]) -> None:
    """Note the times of files that were found whole, as after a copy of the cache."""
    times = {name: (home / Path(name).name).stat().st_mtime_ns for name in files}
    with suppress(OSError):  # a cache that can't be written to serves as it is
        write_json(
            home / MANIFEST,
            {name: (size, times[name], sums) for name, (size, _, sums) in files.items()},
        )


def stamp_file(file: Path) -> list[str | int]:
    """Path, size and time of the last change. UserError: the file is missing."""
    try:
        status = file.stat()
    except OSError as error:
        raise UserError(
            f"{file}: {error.strerror}", "make it again, or copy it again", "data.source"
        ) from None
    return [str(file), status.st_size, status.st_mtime_ns]


def cache_key(identity: object) -> str:
    """The name of an entry. identity: everything that the entry is made from, as JSON holds it."""
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:24]


def keep_texts(folder: Path, texts: Mapping[str, str]) -> dict[str, Path]:
    """Files with these texts, by name, in a directory that is named by their content."""
    home = folder / hashlib.sha256("".join(texts.values()).encode()).hexdigest()[:24]

    def make(scratch: Path) -> None:
        for name, text in texts.items():
            (scratch / name).write_text(text)

    cache_entry(home, make)
    return {name: home / name for name in texts}
