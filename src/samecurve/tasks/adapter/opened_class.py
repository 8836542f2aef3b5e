"""A class as people write it (tasks/protocol.py), opened: its object, its members and their calls,
its data.
"""

import inspect
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from samecurve.core.config.sections import Config, section_argument
from samecurve.core.protocols import START, Part, Progress
from samecurve.errors import RunError, SamecurveError, UserError
from samecurve.tasks.adapter.returned import parameters_of
from samecurve.tasks.adapter.rows import Rows
from samecurve.tasks.protocol import MEMBERS, TaskMethods
from samecurve.tasks.user_class.user_errors import calling

if TYPE_CHECKING:
    from samecurve.tasks.adapter.columns import Collation

_DATA = {"train": "train_data", "eval": "eval_data", "test": "test_data"}  # each one's method
_OF_STEPS = {"loss", "features", "batch_loss", "metrics"}  # methods that each step calls


NEEDED = {name: MEMBERS[name] for name in ("model", "loss", "train_data")}


class OpenedClass:
    """A task's object, made from its class, and checked.

    task_class: as people write it
    config: the whole config
    cache: a directory where the task may keep what it prepares
    assets: the files that a run keeps of its task, where the task is opened to use a trained
        model; a class whose __init__ asks for them is then opened without its data
    file: the user's file, whose lines its errors name; None: the code is ours

    name: of the class
    is_ours: the class is this program's own, whose errors are not explained as a user's
    task: the object itself
    methods: its members, looked up once
    phases: the patterns of parameters that each phase of a step trains; empty: one update a step
    loss_asks: loss() is to be given the step, the epoch or the phase
    rows: of the training data ("train"), and of "eval" and "test" where the class has them
    """

    needed: ClassVar[Mapping[str, str]] = {"train_data": MEMBERS["train_data"]}

    def __init__(
        self,
        task_class: type,
        config: Config,
        cache: Path | str,
        *,
        assets: Path | None = None,
        file: Path | None = None,
    ) -> None:
        self.name, self.config, self.file = task_class.__name__, config, file
        self.is_ours = file is None
        self._loss_worked: bool = False
        self._parameters: dict[str, frozenset[str]] = {}  # of methods, as far as asked for
        arguments = {
            "model": section_argument(config.model),
            "data": section_argument(config.data),
            "cache": Path(cache),
            "assets": assets,
            "engine": config.engine,
            "seed": config.train.seed,
        }
        with _seeded_everywhere(config.train.seed):
            with self.calling("__init__"):
                self.task = _object_of(task_class, arguments)
            self.phases: Mapping[str, tuple[str, ...]] = {}
            self.methods = self._checked_methods()
            self.loss_asks = bool(self.asked("loss") & {"step", "epoch", "phase"})
            self.rows: Mapping[str, Rows] = {}
            if assets is None or "assets" not in parameters_of(task_class):
                self.rows = dict(self._opened_rows())

    def _checked_methods(self) -> TaskMethods:
        """The class's members. Those of our own classes are held by our tests."""
        methods = TaskMethods(self.task)
        if not self.is_ours or methods.phases:
            from samecurve.tasks.adapter.class_checks import check_class, read_phases

            check_class(self.task, methods, self.name, self.needed)
            self.phases = read_phases(methods, self.name)
        return methods

    def calling(
        self, method: str, kind: type[SamecurveError] | None = None
    ) -> AbstractContextManager[None]:
        """Surround a call of a user's code: what it raises becomes an error that names its line.

        kind: of that error; None: once a loss has worked, that of a step's methods is the run's
        """
        if kind is None:
            kind = RunError if self._loss_worked and method in _OF_STEPS else UserError
        return calling(f"{self.name}.{method}()", self.file, kind)

    def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Call a method that the class has, or that has a default."""
        with self.calling(method):
            return getattr(self.methods, method)(*arguments, **named)

    def arguments_of(
        self, method: str, progress: Progress = START, phase: str = "", **others: Any
    ) -> dict[str, Any]:
        """The arguments that a method of the class asks for by name.

        phase: '': the first
        """
        values = {"step": progress.step, "epoch": progress.epoch, **others}
        if self.phases:
            values["phase"] = phase or next(iter(self.phases))
        return {name: values[name] for name in values.keys() & self.asked(method)}

    def asked(self, method: str) -> frozenset[str]:
        """The names of a method's parameters; none where the class has no such method."""
        if method not in self._parameters:
            bound = getattr(self.methods, method)
            self._parameters[method] = parameters_of(bound) if callable(bound) else frozenset()
        return self._parameters[method]

    def wrong(self, method: str, cause: str, remedy: str) -> UserError:
        return UserError(f"{self.name}.{method}() {cause}", remedy, "task")

    # Its data

    def _opened_rows(self) -> Iterator[tuple[str, Rows]]:
        for which, method in _DATA.items():
            with self.calling(method):
                data = getattr(self.methods, method)()
                if data is not None or which == "train":
                    yield which, Rows(data, f"{self.name}.{method}()", self.file, self._collation())

    def _collation(self) -> "Collation | None":
        """How samples of unlike length become arrays. UserError: this engine can't have that."""
        collate, name = self.methods.collate, f"{self.name}.collate()"
        if collate is None:
            return None
        if self.config.engine == "jax":
            raise UserError(
                f"{name}: engine jax compiles its step for one shape of row, which padding by"
                " microbatch would change from step to step",
                "pad the rows to one length in the data, and take collate() out; or --engine torch",
                "task",
            )
        from samecurve.tasks.adapter.columns import Collation

        return Collation(collate, name)

    def train_data(self) -> Rows:
        return self.rows["train"]  # KeyError: opened to use a trained model, without data

    def eval_data(self) -> Rows | None:
        return self.rows.get("eval")

    def test_data(self) -> Rows | None:
        return self.rows.get("test")

    def check_rows(self) -> None:
        """UserError: a row is not the same when it is read again.

        Rows of our own tasks that have a fingerprint() are not read: our tests hold them.
        """
        if self.is_ours and self.methods.fingerprint is not None:
            return
        for which, rows in self.rows.items():
            with self.calling(_DATA[which]):
                rows.check()

    def fingerprint(self) -> str:
        """The fingerprint of the training data: the class's own, or else the data's own.

        Without either, a hash over the number of samples and up to 16 of them, spread over the
        data. Code of a user has that hash beside its own fingerprint, so that each process tells
        whether its rows are those of the plan. Rows whose files prepare() makes can't be read yet.
        """
        if self.methods.fingerprint is None:
            with self.calling("train_data"):
                own = self.train_data().fingerprint()
        else:
            own = str(self.call("fingerprint"))
        if self.is_ours or self.methods.prepare is not None:
            return own
        with self.calling("train_data"):
            return self.train_data().with_rows(own)

    @property
    def prepare(self) -> Callable[[Any, Part], Iterator[tuple[int, int]]] | None:
        """The class's own prepare(), which makes files that rows need; None: it has none."""
        return self._prepare if self.methods.prepare is not None else None

    def _prepare(self, device: Any, part: Part) -> Iterator[tuple[int, int]]:
        with self.calling("prepare"):
            yield from self.methods.prepare(device, part)

    @property
    def prepared_files(self) -> str:
        """What the files of prepare() hold, in words that follow "files"; '' if it is not said."""
        return str(getattr(self.task, "prepared_files", ""))

    def assets(self) -> Mapping[str, Path]:
        """The files that a run keeps, by name, so that its model can be used later."""
        return dict(self.call("assets"))


def _object_of(task_class: type, arguments: Mapping[str, Any]) -> Any:
    """The object, made with what its __init__ asks for by name; else with both sections."""
    parameters = inspect.signature(task_class).parameters
    sections = {name: arguments[name] for name in ("model", "data")}
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return task_class(**sections)
    named = {name: value for name, value in arguments.items() if name in parameters}
    if named or not parameters:
        return task_class(**named)
    return task_class(*sections.values())


@contextmanager
def _seeded_everywhere(seed: int) -> Iterator[None]:
    """Seed the global generators, so that every process draws the same values, for a while."""
    has_torch = "torch" in sys.modules  # if the task's file has imported it
    if has_torch:  # waits, where another thread is importing it (run/warm_start.py)
        import torch
    python_state, numpy_state = random.getstate(), np.random.get_state()
    torch_state = torch.random.get_rng_state() if has_torch else None
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if has_torch:
        torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        if torch_state is not None:
            torch.random.set_rng_state(torch_state)
