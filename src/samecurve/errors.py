"""Errors in the user's words, each with a cause, a remedy and its place.

SamecurveError            everything that we raise on purpose
├── UserError            the command line, the config or the data must change   exit 2
│   ├── InvalidConfigError     all the errors of one config, at once
│   └── NotSameBitsError       a run can't have the same bits on any devices here (train.exact)
└── RunError             the run itself could not go on                         exit 1, or 75 where
    │                    another start may help
    └── FaultyDeviceError    a device computes wrong                            exit 76

not_hiding() and closing_all() handle what fails while a failure is handled, or at the end.
"""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from samecurve.terminal import printable, shorten

# characters: a failure takes one screen, whatever was put into its texts
_MOST_CAUSE, _MOST_REMEDY, _MOST_WHERE, _MOST_OF_ONE = 1600, 1600, 400, 500
MOST_ERRORS = 12  # of a config that are told
# the key and the flags of runs with the same bits on any devices, as messages name them
SAME_BITS, ASK_SAME_BITS, WITHOUT_SAME_BITS = "train.exact", "--exact", "--no-exact"
START_AGAIN = 75  # the exit code after which the same command may go on (EX_TEMPFAIL)
FAULTY_DEVICE = 76  # the exit code after which a device is to be left out


class SamecurveError(Exception):
    """A failure with its cause, its remedy and, where known, its place (file:line:column, flag)."""

    exit_code = 1
    rank: int | None = None  # the rank that failed, if it was one

    def __init__(self, cause: str, remedy: str = "", where: str = "") -> None:
        texts = (cause, _MOST_CAUSE), (remedy, _MOST_REMEDY), (where, _MOST_WHERE)
        self.cause, self.remedy, self.where = (
            shorten(printable(text), most) for text, most in texts
        )
        super().__init__(self.cause, self.remedy, self.where)

    @property
    def reason(self) -> str:
        """The cause, where another sentence says what is refused."""
        return self.cause

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where and not self.cause.startswith(self.where) else ""
        return "\n".join([f"{place}{self.cause}", *self._lines_below()])

    def _lines_below(self) -> list[str]:
        """The lines below the cause."""
        return [f"  remedy: {self.remedy}"] if self.remedy else []


class UserError(SamecurveError):
    """Input that cannot be honoured: refused before anything is trained or written."""

    exit_code = 2


class InvalidConfigError(UserError):
    """All errors of a config, so that one edit can correct them all."""

    errors: tuple[UserError, ...]
    more: int  # beside these errors

    def __init__(self, errors: Sequence[UserError], more: int = 0) -> None:
        """errors: an InvalidConfigError among them stands for its own errors.

        more: the number of errors beside these
        """
        every: list[UserError] = []
        for error in errors:
            if isinstance(error, InvalidConfigError):
                every += error.errors
                more += error.more
            else:
                every.append(error)
        super().__init__(f"{len(every) + more} errors in the config")
        self.errors = tuple(every[:MOST_ERRORS])
        self.more = more + len(every) - len(self.errors)

    def __str__(self) -> str:
        texts = [str(error) for error in self.errors]
        if len(texts) > 1:
            texts = [shorten(text, _MOST_OF_ONE) for text in texts]
        if self.more:
            texts.append(f"and {self.more} more like these")
        return "\n".join(texts)


class NotSameBitsError(UserError):
    """A run can't have the same bits on any devices here.

    Whoever raises this says why, and what else would do.
    """

    def __init__(self, why: str, remedy: str = "", where: str = "", *, instead: str = "") -> None:
        """instead: what the plan could choose, in a few words; '': nothing is known"""
        why = why.removeprefix(f"{SAME_BITS}: ")  # where it is made from another's texts
        if WITHOUT_SAME_BITS not in remedy:
            remedy = f"{remedy}, or {WITHOUT_SAME_BITS}" if remedy else WITHOUT_SAME_BITS
        super().__init__(f"{SAME_BITS}: {why}", remedy, where or SAME_BITS)
        self._reason = f"{why} ({instead})" if instead else why

    @property
    def reason(self) -> str:
        return self._reason


class Refusals:
    """Refusals that don't hinder each other, given together: one edit can answer them all."""

    def __init__(self) -> None:
        self._errors: list[UserError] = []

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Keep a UserError of the block for later."""
        try:
            yield
        except UserError as error:
            self._errors.append(error)

    def collect(self, check: Callable[..., object], *arguments: Any, **options: Any) -> None:
        """Call a check, and keep its UserError for later."""
        with self.collected():
            check(*arguments, **options)

    def __bool__(self) -> bool:
        return bool(self._errors)

    def raise_any(self) -> None:
        """Raise what was collected. UserError: there is something."""
        if len(self._errors) == 1:
            raise self._errors[0]
        if self._errors:
            raise InvalidConfigError(self._errors)


class RunError(SamecurveError):
    """A run that could not go on: a lost rank, a full disk, a loss that is not finite.

    again: another start may help (after a lost rank it may, with a full disk it does not)
    trace: lines that say where the failure arose
    log: the file with the whole output
    """

    def __init__(
        self,
        cause: str,
        remedy: str = "",
        where: str = "",
        *,
        again: bool = False,
        trace: str = "",
        log: str = "",
    ) -> None:
        super().__init__(cause, remedy, where)
        self.again, self.trace, self.log = again, trace, log
        if again:
            self.exit_code = START_AGAIN

    def give_up(self) -> None:
        """Note that another start was tried, and does not help."""
        self.again, self.exit_code = False, 1

    def _lines_below(self) -> list[str]:
        lines = [f"  {line}" for line in self.trace.splitlines()]
        lines += super()._lines_below()
        if self.log:
            lines.append(f"  log: {self.log}")
        return lines


class FaultyDeviceError(RunError):
    """A device computes wrong, each time: another start must leave it out."""

    def __init__(self, cause: str, remedy: str = "", where: str = "") -> None:
        super().__init__(cause, remedy, where)
        self.exit_code = FAULTY_DEVICE

    def give_up(self) -> None:
        """Another start was never meant to help."""


def message_of(error: BaseException) -> str:
    """The text of any exception; making the text may fail too, in a class of the user's."""
    try:
        return str(error)
    except Exception as another:
        return f"(its own text can't be made: {type(another).__name__})"


class Interrupted(KeyboardInterrupt):
    """A signal that asks this process to stop, while no run is under way that could save.

    kept: what the interrupted work has kept, and how to go on; '': nothing was kept
    """

    kept = ""

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__(number)
        self.number = number

    @property
    def by(self) -> str:
        """The signal that stopped this process, in the user's words."""
        return "Ctrl-C" if self.number == signal.SIGINT else signal.Signals(self.number).name


@contextmanager
def keeping(kept: str) -> Iterator[None]:
    """Say what is kept where the block is interrupted. An inner block's text has precedence."""
    try:
        yield
    except Interrupted as stop:
        stop.kept = stop.kept or kept
        raise


def is_ctrl_c(error: BaseException) -> bool:
    """Whether somebody pressed Ctrl-C. If not, a user's own code has raised a KeyboardInterrupt."""
    if isinstance(error, Interrupted):
        return True
    heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return isinstance(error, KeyboardInterrupt) and heard


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
