"""The mark by which a user knows the jobs that this user has added.

A job's file may have come with a folder, and a worker would run its command. So each job has a mark
over all that is run and where, made with a secret that lies in the user's cache directory and that
nobody else can read. A job without it is shown as foreign, and is not started.
"""

import hashlib
import hmac
import json
import os
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from samecurve.seam import UserError, cache_home, explain_os_error, regular_only

_BYTES = 32  # of the secret


def mark_of(content: Mapping[str, object], queue: Path) -> str:
    """The user's mark for a job's content in a queue. UserError: the secret can't be used.

    queue: the queue's directory; the mark counts in no other
    """
    text = json.dumps({"queue": str(queue.resolve()), **content}, sort_keys=True)
    return hmac.new(secret(), text.encode(errors="surrogateescape"), hashlib.sha256).hexdigest()


def why_foreign(mark: object, content: Mapping[str, object], queue: Path) -> str:
    """Why a job is not known to be the user's own; '': it is."""
    try:
        own = mark_of(content, queue)
    except UserError as error:
        return f"{error.cause}; {error.remedy}"
    is_own = isinstance(mark, str) and mark.isascii() and hmac.compare_digest(mark, own)
    return "" if is_own else "it has no mark of yours: it came with the folder, or is an old job"


def secret() -> bytes:
    """The user's secret, made at the first use. UserError: it can't be read, or others can."""
    path = cache_home() / f"job-secret-{os.getuid()}"
    try:
        if not os.path.lexists(path):
            _make(path)
        with open(path, "rb", opener=regular_only) as file:
            status = os.fstat(file.fileno())
            content = file.read(_BYTES + 1)
    except OSError as error:
        cause, remedy = explain_os_error(error, path, "give the same command again")
        raise UserError(cause, remedy, "SAMECURVE_CACHE") from None
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise UserError(
            f"{path}, which marks your jobs, can be read or written by others",
            f"chmod 600 {path} (and chown it to you); if somebody may have read it, remove it: jobs"
            " that wait are then to be accepted again",
            "SAMECURVE_CACHE",
        )
    if len(content) != _BYTES:
        raise UserError(
            f"{path}, which marks your jobs, does not have {_BYTES} bytes",
            "remove it; jobs that wait are then to be accepted again",
            "SAMECURVE_CACHE",
        )
    return content


def _make(path: Path) -> None:
    """Write the secret whole, unless another process is first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{secrets.token_hex(6)}")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o600)
            file.write(secrets.token_bytes(_BYTES))
        with suppress(FileExistsError):
            os.link(new, path)
    finally:
        new.unlink()
