"""A method of a task's class that is called for every microbatch.

What the method asks for by name is known when the task is opened, so that a call looks at no
signature. What the method raises becomes an error that names the user's line.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from samecurve.core.protocols import START, Progress
from samecurve.errors import RunError, UserError
from samecurve.tasks.adapter.data_kinds import parameters_of
from samecurve.tasks.adapter.task_methods import Method
from samecurve.tasks.user_class.user_errors import end_copy, raise_explained


@dataclass
class LossHistory:
    """Whether the loss has come out well once.

    Until then an error of the task's code is one of what the user wrote (UserError); from then on,
    one of the run (RunError).
    """

    worked: bool = False


class UserCall:
    """A method with the names that it asks for among step, epoch and phase.

    what: the method, for errors: "MyTask.loss()"
    file: the user's file, whose lines errors name; None: the code is ours
    phases: names of the phases of a step; none: there is one update a step
    """

    def __init__(
        self,
        method: Method | None,
        what: str,
        *,
        file: Path | None,
        phases: Iterable[str] = (),
        history: LossHistory | None = None,
    ) -> None:
        self.method: Any = method
        self._what, self._file, self._history = what, file, history or LossHistory()
        self._first_phase = next(iter(phases), "")
        known = {"step", "epoch", "phase"} if self._first_phase else {"step", "epoch"}
        self.asks = known & parameters_of(method) if method else frozenset[str]()

    def __call__(self, *arguments: Any, progress: Progress = START, phase: str = "") -> Any:
        """Call the method. phase: '': the first of the step"""
        process = os.getpid()
        try:
            returned = self.method(*arguments, **self.named(progress, phase))
        except BaseException as error:
            self.raise_explained(error, process)
        self.end_copy(process)
        return returned

    def named(self, progress: Progress, phase: str) -> dict[str, Any]:
        """The arguments that the method asks for by name."""
        values = {
            "step": progress.step,
            "epoch": progress.epoch,
            "phase": phase or self._first_phase,
        }
        return {name: values[name] for name in self.asks}

    def raise_explained(self, error: BaseException, process: int) -> NoReturn:
        """Raise what the method has raised as an error with its place.

        process: the id of the process that called the method
        """
        kind = RunError if self._history.worked else UserError
        raise_explained(error, self._what, self._file, kind, process)

    def end_copy(self, process: int) -> None:
        """End this process if the method has forked it: the copy would train the run again."""
        if self._file is not None and os.getpid() != process:
            end_copy(self._what)
