"""Answers to questions: given by flags, taken by default, or typed on a terminal.

Every answer goes through the question's check. A wrong one ends the command where it came from a
flag; a person who types is told the cause and the remedy, and is asked again.
"""

import os
import select
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from samecurve.core.config.loading import SEE_TABLE
from samecurve.seam import InvalidConfigError, SamecurveError, UserError, echo

Checked = TypeVar("Checked")
_YES, _NO = {"yes", "y"}, {"no", "n"}


class InputEndedError(UserError):
    """Ctrl-D, where an answer is wanted."""


@dataclass(frozen=True)
class Question:
    """A question.

    flag: what answers it on the command line
    default: None: there is none
    remedy: for a value that the config does not take
    """

    flag: str
    text: str
    default: str | None = None
    remedy: str = ""


class Answers:
    """Where answers come from."""

    def __init__(self, by_flag: Mapping[str, str], *, asks: bool) -> None:
        """by_flag: answers by flag. asks: False: the defaults answer all other questions"""
        self._by_flag = dict(by_flag)
        self.asks = asks

    def by_flag(self, flag: str) -> str | None:
        """The answer that a flag gives."""
        return self._by_flag.get(flag)

    def without_asking(self) -> "Answers":
        """The same answers; the defaults answer what is not given."""
        return Answers(self._by_flag, asks=False)

    def forget(self, *flags: str) -> None:
        """Have these questions asked, whatever their flags gave."""
        for flag in flags:
            self._by_flag.pop(flag, None)

    def ask(self, question: Question, check: Callable[[str], Checked]) -> Checked:
        """The checked answer. check: raises a SamecurveError for a wrong answer

        UserError: an answer that was not typed is wrong or missing.
        """
        flagged = self._by_flag.get(question.flag)
        if flagged is None and self.asks:
            return self._ask_until_right(question, check)
        answer = flagged if flagged is not None else question.default
        if answer is None:
            raise UserError(f"{question.text}: no answer", f"give {question.flag}", question.flag)
        return _checked(answer, question, check)

    def confirm(self, question: Question) -> bool:
        """A question whose answer is yes or no."""
        return self.ask(question, lambda answer: _is_yes(answer, question.flag))

    def _ask_until_right(self, question: Question, check: Callable[[str], Checked]) -> Checked:
        shown = f" [{question.default}]" if question.default is not None else ""
        while True:
            answer = _read_line(f"{question.text}{shown}: ").removeprefix(f"{question.flag} ")
            answer = answer.strip() or (question.default or "")
            try:
                if not answer:
                    raise UserError("this question has no default", "type an answer")
                return _checked(answer, question, check)
            except SamecurveError as error:
                tell(error)


def _checked(answer: str, question: Question, check: Callable[[str], Checked]) -> Checked:
    """Check an answer. SamecurveError: it is wrong."""
    try:
        return check(answer)
    except UserError as error:
        (first, *others) = single_errors(error)
        if others or first.remedy != SEE_TABLE or not question.remedy:
            raise
        raise UserError(first.cause, question.remedy, question.flag) from None


def tell(error: SamecurveError, indent: str = "  ") -> None:
    """Show what is wrong with an answer, below it."""
    for one in single_errors(error):
        remedy = f"\n{indent}remedy: {one.remedy}" if one.remedy else ""
        echo(f"{indent}{one.cause}{remedy}")


def single_errors(error: SamecurveError) -> Sequence[SamecurveError]:
    """The errors within an error."""
    return error.errors if isinstance(error, InvalidConfigError) else (error,)


def _is_yes(answer: str, flag: str) -> bool:
    if answer.lower() not in _YES | _NO:
        raise UserError(f"{answer!r} is neither yes nor no", "type yes or no", flag)
    return answer.lower() in _YES


def _read_line(prompt: str) -> str:
    """Read a line that a person types. InputEndedError: Ctrl-D."""
    sys.stdout.write(prompt)
    sys.stdout.flush()
    try:
        _wait_for_input()
        line = sys.stdin.readline()
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        raise
    except UnicodeDecodeError:
        return "\N{REPLACEMENT CHARACTER}"  # which no check takes
    if not line:
        sys.stdout.write("\n")
        raise InputEndedError(
            "Ctrl-D ended the questions before all were answered; nothing was written",
            "the same command begins anew; Enter takes the answer in brackets",
        )
    return line.strip()


def _wait_for_input() -> None:
    """Wait for input or for a signal. A signal that comes just before a read begins would be heard
    only after the read.
    """
    heard, wakes = os.pipe()
    os.set_blocking(wakes, False)
    before = signal.set_wakeup_fd(wakes)
    try:
        select.select([sys.stdin, heard], [], [])
    finally:
        signal.set_wakeup_fd(before)
        os.close(heard)
        os.close(wakes)
