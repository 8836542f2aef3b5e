"""Causes and remedies of the errors that the system reports about files."""

import errno
import os
from pathlib import Path

_GO_ON = "run the same command again: it goes on from the last save"


def explain_os_error(error: OSError, path: Path, then: str = _GO_ON) -> tuple[str, str]:
    """Explain why a file or directory can't be written or read. Returns the cause and the remedy.

    path: the file or directory
    then: what to do once the cause is mended
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
