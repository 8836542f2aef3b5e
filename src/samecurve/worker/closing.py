"""Ends that fail: what fails while a failure is handled, or while things are closed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def not_hiding(failure: BaseException) -> Iterator[None]:
    """Handle a failure in the block. What fails there is noted on the failure, and not raised."""
    try:
        yield
    except Exception as another:
        failure.add_note(f"and, while that was handled: {type(another).__name__}: {another}")


@contextmanager
def closing_all(*closers: Callable[[], object]) -> Iterator[None]:
    """Call all closers after the block, in this order, whatever fails.

    The first failure is raised: the block's own before those of the closers.
    """
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failure = error
    for close in closers:
        try:
            close()
        except Exception as error:
            if failure is None:
                failure = error
            else:
                failure.add_note(f"and, at the end: {type(error).__name__}: {error}")
    if failure is not None:
        raise failure
