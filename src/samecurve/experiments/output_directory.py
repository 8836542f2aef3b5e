"""The directory for an experiment's files, which are written completely or not at all."""

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from samecurve.errors import RunError, UserError


def check_writable(directory: Path, flag: str, remedy: str) -> None:
    """Check a directory, or the one above it that exists. UserError: it takes no files."""
    there = next(path for path in (directory, *directory.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        cause = f"{flag}: nothing can be written into {there}: {error.strerror}"
        raise UserError(cause, remedy, flag) from None


@dataclass(frozen=True)
class OutputDirectory:
    """A directory that does not exist yet, or is empty."""

    home: Path

    @classmethod
    def at(cls, to: Path | None, kind: str, name: str) -> "OutputDirectory":
        """Choose the directory. to: the value of --to; None: KIND/NAME-TIME.

        UserError: the directory is not empty, or can't be written.
        """
        base = Path(kind) / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        numbered = [base.with_name(f"{base.name}-{number}") for number in range(2, 1000)]
        free = (home for home in (base, *numbered) if not home.exists())
        output = cls(to or next(free, base))
        output._check()
        return output

    def _check(self) -> None:
        if self.home.exists() and (not self.home.is_dir() or any(self.home.iterdir())):
            raise UserError(
                f"--to: {self.home} is there already",
                "choose a new or an empty directory",
                "--to",
            )
        remedy = "--to DIR, a directory in which you may write"
        check_writable(self.home.absolute(), "--to", remedy)

    def publish(self, files: Mapping[str, bytes]) -> list[Path]:
        """Write files by name. RunError: a file can't be written; then none is written."""
        new, complete = not self.home.exists(), False
        parts = {name: self.home / f".{name}.part-{os.getpid()}" for name in files}
        try:
            self.home.mkdir(parents=True, exist_ok=True)
            for name, content in files.items():
                parts[name].write_bytes(content)
            for name, part in parts.items():
                part.rename(self.home / name)
            complete = True
        except OSError as error:
            raise RunError(
                f"{self.home} can't be written: {error.strerror}",
                "--to DIR where you may write and there is room",
                "--to",
            ) from None
        finally:
            if not complete:
                paths = [*parts.values(), *(self.home / name for name in files)]
                self._remove(paths, directory=new)
        return [self.home / name for name in files]

    def _remove(self, paths: Sequence[Path], *, directory: bool) -> None:
        with suppress(OSError):  # the directory may not be removable either
            for path in paths:
                path.unlink(missing_ok=True)
            if directory:
                self.home.rmdir()
