"""The cache: where the program keeps what it can make again, and how an entry is found again by the
files, or by the content, that it is made from.

The only file below probe/ that reads the environment: a user's task may open shards, which are
indexed in the cache, before any room above has been imported.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from samecurve.core.system.files import directory_made_once
from samecurve.errors import UserError


def cache_home(environment: Mapping[str, str] = os.environ) -> Path:
    """The directory of token files, facts and indices.

    SAMECURVE_CACHE names it; else it lies in the user's cache directory.
    """
    if environment.get("SAMECURVE_CACHE"):
        return Path(environment["SAMECURVE_CACHE"])
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "samecurve"


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
    if not home.is_dir():
        with directory_made_once(home) as scratch:
            for name, text in texts.items():
                (scratch / name).write_text(text)
    return {name: home / name for name in texts}
