"""Entries of the cache: found again by the files, or by the content, that they are made from."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from samecurve.core.system.cache import cache_entry
from samecurve.errors import UserError


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
