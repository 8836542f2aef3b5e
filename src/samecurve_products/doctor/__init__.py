"""`samecurve check`: whether this machine is fit to train, what is wrong, and what to do.

A file a subject. Each has a function that gives a list of Check and takes what it reads as
arguments, so that a test can plant a fault in a file, a limit or a driver's library.
"""

from dataclasses import dataclass
from typing import Literal

Status = Literal["PASS", "WARN", "FAIL"]


@dataclass(frozen=True)
class Check:
    """The answer to one question about the machine. The fields are keys of `--json`."""

    name: str
    status: Status
    figure: str  # what was read or measured; may have several lines
    remedy: str = ""  # what to do; '' only with PASS


def passed(name: str, figure: str) -> Check:
    return Check(name, "PASS", figure)


def warned(name: str, figure: str, remedy: str) -> Check:
    return Check(name, "WARN", figure, remedy)


def failed(name: str, figure: str, remedy: str) -> Check:
    return Check(name, "FAIL", figure, remedy)
