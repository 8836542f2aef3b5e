"""A picture file as a scan has found it, and its bytes later on."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from samecurve.seam import UserError, explain_os_error
from samecurve_products.pictures.files.picture_files import BrokenPictureError, FileFacts
from samecurve_products.pictures.files.scan_cache import Stamp

_AGAIN = "put the file back as it was when this run began; or begin another run"


@dataclass(frozen=True)
class StoredPicture:
    """A picture file as the scan found it: what its pixels are read by.

    stamp: size and time of the file
    """

    path: Path
    stamp: Stamp
    facts: FileFacts


def read_content(file: StoredPicture) -> bytes:
    """The bytes of a file. UserError: they are not those that were scanned."""
    try:
        content = file.path.read_bytes()
        status = file.path.stat()
    except OSError as error:
        raise UserError(*explain_os_error(error, file.path, _AGAIN), "data.source") from None
    touched = (status.st_size, status.st_mtime_ns) != file.stamp
    if touched and hashlib.sha256(content).hexdigest() != file.facts.sha256:
        raise UserError(f"{file.path} has changed since the run began", _AGAIN, "data.source")
    return content


def unreadable(file: StoredPicture, error: BrokenPictureError) -> UserError:
    """The error of a file that the scan could decode."""
    return UserError(
        f"{file.path} can't be read any more: {error}",
        f"{_AGAIN}, with the version of Pillow that it began with",
        "data.source",
    )
