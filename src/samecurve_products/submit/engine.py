"""What every engine has: a file that says the job, and a command that submits the file."""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import yaml

from samecurve.processes import output_of
from samecurve.seam import RunError, UserError, explain_os_error, install_command, start_program

MADE_BY = "made by samecurve submit"  # in the first lines of a file that may be written again


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A job as one engine takes it."""

    path: Path
    text: str
    argv: tuple[str, ...]  # the command that submits the file
    install: str  # how the command's program comes onto a machine
    library: str = ""  # which the command imports into this Python
    streams: bool = False  # the program takes long: what it prints is shown as it comes


class _Dumper(yaml.SafeDumper):
    """Writes as a person would: no references, and a script line by line."""

    def ignore_aliases(self, _data: object) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        style = "|" if "\n" in data else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)


def yaml_text(documents: Iterable[dict[str, Any]]) -> str:
    """Documents as YAML."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=1000)


def write(submission: Submission) -> None:
    """Write the file. UserError: it can't be written, or is somebody's own."""
    path = submission.path
    try:
        if path.exists() and MADE_BY not in path.read_text(errors="replace")[:400]:
            raise UserError(
                f"{path} exists, and samecurve submit has not made it",
                "--write FILE names another file",
                "--write",
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(submission.text)
    except OSError as error:
        raise UserError(*explain_os_error(error, path, "--write FILE"), "--write") from None


def submit(submission: Submission) -> str:
    """Submit the file. Returns what the engine's program printed.

    UserError: there is no such program here. RunError: it refused the job; its words are the cause.
    """
    program = submission.argv[0]
    if shutil.which(program) is None:
        raise UserError(
            f"there is no {program} on this machine",
            f"{submission.install}; {submission.path} is written, to be submitted elsewhere",
            program,
        )
    if submission.library and find_spec(submission.library) is None:
        raise UserError(
            f"{submission.library} is not installed here",
            f"{install_command(submission.library)}; {submission.path} is written, to be run"
            " elsewhere",
            submission.library,
        )
    if submission.streams:
        return _ended(start_program(submission.argv, stdin=DEVNULL).wait(), program)
    done = output_of(submission.argv)
    if done.returncode:
        words = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise RunError(
            f"{program} refused the job (exit code {done.returncode}): {' '.join(words)}",
            f"change the job and submit it again; {submission.path} is what was refused",
            program,
        )
    return "\n".join(part for part in (done.stdout.strip(), done.stderr.strip()) if part)


def _ended(code: int, program: str) -> str:
    """The end of a program whose words were shown. RunError: it failed."""
    if code:
        raise RunError(
            f"{program} left with exit code {code}", "its own words stand above", program
        )
    return ""
