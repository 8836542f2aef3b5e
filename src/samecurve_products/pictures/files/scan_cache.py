"""The facts of picture files, kept in the cache: a file is decoded whole once.

A file is known again by its path, size and time of change, so a second start reads no picture. What
can't be read is kept too, with the reason.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from samecurve.core.planning.fixed import parse_dataclass
from samecurve.core.system import one_at_a_time
from samecurve.probe import cpu_cores
from samecurve.seam import UserError, cache_key, explain_os_error, write_json
from samecurve_products.pictures.files.picture_files import (
    BrokenPictureError,
    FileFacts,
    check_pillow,
    inspect_file,
    only_errors,
)

_FORMAT = 2  # of the cache
_THREADS = 8  # at most; Pillow decodes without holding Python's lock
_SAY_EVERY = 5.0  # seconds
_TOGETHER = 128  # files under way, which an interruption waits for

Stamp = tuple[int, int]  # size and time of change, in nanoseconds


@dataclass(frozen=True)
class Scanned:
    """A file, found whole or broken.

    stamp: size and time when it was read. facts: None: it can't be read. reason: why
    """

    stamp: Stamp
    facts: FileFacts | None
    reason: str = ""


def scan_files(
    root: Path,
    pictures: Sequence[Path],
    masks: Sequence[Path],
    cache: Path,
    say: Callable[[str], None],
) -> Mapping[Path, Scanned]:
    """The facts of files below a folder; those that the cache lacks are read now.

    say: is told now and then how far it is
    UserError: a file has gone since it was listed.
    """
    version = check_pillow()  # another version may find another file whole
    stamps = {path: _stamp(path) for path in (*pictures, *masks)}
    home = cache / f"{cache_key([_FORMAT, version, str(root)])}.json"
    known = _known(home, root, stamps)
    if len(known) == len(stamps):
        return known
    with one_at_a_time(home.with_suffix(".lock")):  # ranks of one machine start together
        known = _known(home, root, stamps)
        missing = [path for path in stamps if path not in known]
        try:
            for path, scanned in _scanned(missing, stamps, set(masks), say):
                known[path] = scanned
        finally:  # what is done stays done, whoever interrupts it
            if missing:
                _keep(home, root, known)
    return known


def _stamp(path: Path) -> Stamp:
    try:
        status = path.stat()
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror}", "copy it again, or mend the link", "data.source"
        ) from None
    return status.st_size, status.st_mtime_ns


def _known(home: Path, root: Path, stamps: Mapping[Path, Stamp]) -> dict[Path, Scanned]:
    """What the cache knows of these files as they are now."""
    try:
        entries = json.loads(home.read_text())
        known = {}
        for path, stamp in stamps.items():
            entry = entries.get(_name(path, root))
            if entry is not None and tuple(entry["stamp"]) == stamp:
                known[path] = parse_dataclass(Scanned, entry)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # none, or another's file
        return {}
    return known


def _keep(home: Path, root: Path, known: Mapping[Path, Scanned]) -> None:
    entries: dict[str, Any] = {_name(path, root): asdict(each) for path, each in known.items()}
    write_json(home, entries)


def _name(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()


def _scanned(
    paths: Sequence[Path],
    stamps: Mapping[Path, Stamp],
    masks: set[Path],
    say: Callable[[str], None],
) -> Iterator[tuple[Path, Scanned]]:
    """Read files with several threads."""

    def scan(path: Path) -> Scanned:
        try:
            content = path.read_bytes()
            return Scanned(stamps[path], inspect_file(content, is_mask=path in masks))
        except BrokenPictureError as error:
            return Scanned(stamps[path], None, str(error))
        except OSError as error:
            raise UserError(*explain_os_error(error, path, "start again"), "data.source") from None

    said = time.monotonic()
    threads = min(_THREADS, cpu_cores())
    with only_errors(), ThreadPoolExecutor(threads) as pool:
        for first in range(0, len(paths), _TOGETHER):
            part = paths[first : first + _TOGETHER]
            for number, (path, scanned) in enumerate(zip(part, pool.map(scan, part), strict=True)):
                yield path, scanned
                if time.monotonic() - said > _SAY_EVERY:
                    said = time.monotonic()
                    say(f"data   {first + number + 1:,} of {len(paths):,} pictures looked through")
