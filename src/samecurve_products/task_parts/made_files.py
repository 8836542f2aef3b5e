"""Files that the ranks of a machine make together, before a task's first row is read."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from samecurve.seam import Part

_WAIT = 0.1  # seconds between two looks for another rank's files


class Work(Protocol):
    """A file that is to be there."""

    @property
    def is_done(self) -> bool: ...

    def do(self) -> None:
        """Make the file if it is absent."""


def make_files(
    work: Sequence[Work], part: Part, *, between: Callable[[], None] = lambda: None
) -> Iterator[tuple[int, int]]:
    """Make one part of the files that are absent, and wait for the others' parts.

    Yields how many are there, of how many.

    between: called when this part is made
    """
    total = len(work)
    absent = [each for each in work if not each.is_done]
    if not absent:
        return
    own = [each for each in work[part.number :: part.of] if not each.is_done]
    done = total - len(absent)
    yield done, total
    for each in own:
        each.do()
        done += 1
        yield done, total
    between()
    waiting = [each for each in absent if not each.is_done]
    while waiting:
        yield total - len(waiting), total
        time.sleep(_WAIT)
        waiting = [each for each in waiting if not each.is_done]
    yield total, total
