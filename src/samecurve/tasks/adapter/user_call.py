"""A method of a task's class that is called for every microbatch.

What the method asks for by name is known when the task is opened, so that a call looks at no
signature. What the method raises becomes an error that names the user's line.
"""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

from samecurve.core.protocols import START, Progress
from samecurve.errors import SamecurveError
from samecurve.tasks.adapter.data_kinds import parameters_of
from samecurve.tasks.protocol import Method
from samecurve.tasks.user_class.user_errors import end_copy, raise_explained


class UserCall:
    """A method with the names that it asks for among step, epoch and phase.

    what: the method, for errors: "MyTask.loss()"
    file: the user's file, whose lines errors name; None: the code is ours
    kind: the kind of error that the method's errors become, asked when it raises one
    phases: names of the phases of a step; none: there is one update a step
    """

    def __init__(
        self,
        method: Method | None,
        what: str,
        *,
        file: Path | None,
        kind: Callable[[], type[SamecurveError]],
        phases: Iterable[str],
    ) -> None:
        self.method: Any = method
        self._what, self._file, self._kind = what, file, kind
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
        if os.getpid() != process:
            self.end_copy()
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
        raise_explained(error, self._what, self._file, self._kind(), process)

    def end_copy(self) -> None:
        """End this process, which a user's method has forked: it would train the run again."""
        if self._file is not None:
            end_copy(self._what)
