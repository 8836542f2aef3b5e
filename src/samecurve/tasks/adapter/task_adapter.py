"""A task's class as far as no engine is needed: its data, its schedule, what plan() must know.

engine_adapter.py adds the model; together they are what engines see (core.protocols.Task).
"""

import inspect
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from samecurve.core.config.document import suggest
from samecurve.core.config.sections import Config
from samecurve.core.planning.facts import Facts
from samecurve.core.weights.initial_values import Initial
from samecurve.errors import SamecurveError, UserError
from samecurve.tasks.adapter.class_checks import check_attributes, check_methods, read_phases
from samecurve.tasks.adapter.columns import Collation
from samecurve.tasks.adapter.rows import Rows
from samecurve.tasks.protocol import MEMBERS
from samecurve.tasks.registry import section_argument
from samecurve.tasks.user_class.user_errors import calling


class TaskAdapter:
    """A task of this class, its data open.

    task_class: as people write it (tasks/protocol.py)
    config: the whole config
    cache: a directory where the task may keep what it prepares
    assets: what the run has kept of the task, where it is opened to use a trained model; a class
        whose __init__ asks for it is then opened without its data
    file: the user's file, whose lines its errors name; None: the code is ours
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
        self.name, self._file = task_class.__name__, file
        self._config, self._loss_checked = config, False
        self._parameters: dict[str, set[str]] = {}  # by method
        self.phases: Mapping[str, tuple[str, ...]] = {}  # of a step: patterns of parameters
        self._train: Rows | None = None
        self._held_out: Rows | None = None
        self._test: Rows | None = None
        arguments = {
            "model": section_argument(config.model),
            "data": section_argument(config.data),
            "cache": Path(cache),
            "assets": assets,
            "engine": config.engine,
        }
        with _seeded(config.train.seed):
            with self.calling("__init__"):
                self.task = _instance(task_class, arguments)
            check_methods(self.task, self.name, self.needed, is_users=file is not None)
            if callable(getattr(self.task, "loss", None)):
                self.phases = read_phases(self.task, self.name)
            check_attributes(self.task, self.name)
            if hasattr(self.task, "schedule"):
                self.lr_factor = self._checked_factor
            if assets is None or "assets" not in inspect.signature(task_class).parameters:
                self._open_data()

    @property
    def whole_batch(self) -> bool:
        """Whether the class has a loss over the whole batch's features in place of loss()."""
        return hasattr(self.task, "batch_loss")

    def _open_data(self) -> None:
        with self.calling("train_data"):
            train = self.task.train_data()
            self._train = Rows(train, f"{self.name}.train_data()", self._file, self._collation())
        with self.calling("eval_data"):
            held_out = self.task.eval_data() if hasattr(self.task, "eval_data") else None
            if held_out is not None:
                self._held_out = Rows(
                    held_out, f"{self.name}.eval_data()", self._file, self._collation()
                )
        with self.calling("test_data"):
            test = self.task.test_data() if hasattr(self.task, "test_data") else None
            if test is not None:
                name = f"{self.name}.test_data()"
                self._test = Rows(test, name, self._file, self._collation())

    def _collation(self) -> Collation | None:
        """How samples of unlike length become arrays. UserError: this engine can't have that."""
        if not hasattr(self.task, "collate"):
            return None
        name = f"{self.name}.collate()"
        if not callable(self.task.collate):
            raise UserError(
                f"{self.name}.collate is {type(self.task.collate).__name__}, where a method"
                " collate(self, samples) pads samples of unlike length",
                "another name for it",
                "task",
            )
        if self._config.engine == "jax":
            raise UserError(
                f"{name}: engine jax compiles its step for one shape of row, which padding by"
                " microbatch would change from step to step",
                "pad the rows to one length in the data, and take collate() out; or --engine torch",
                "task",
            )
        return Collation(self.task.collate, name)

    def describe_model(self) -> Mapping[str, Any]:
        """What Facts says of the model, found by building it without its values."""
        raise UserError(
            f"{self.name}.facts() tells no `arrays`, and without an engine no model can be built",
            'give the shape of each parameter: {"arrays": {"head.weight": (10, 64), ...}, ...}',
            "task",
        )

    def facts(self) -> Facts:
        """What plan() must know: what the class tells, and what else is found."""
        self._check_rows()
        task_facts = self._task_facts()
        if "arrays" in task_facts:
            described: Mapping[str, Any] = self._describe_arrays(task_facts)
        else:
            described = self.describe_model()
        return Facts(
            **{
                "samples": len(self.train_data()),
                "eval_samples": len(self._held_out) if self._held_out else 0,
                "test_samples": len(self._test) if self._test else 0,
                "tokens_per_sample": 1,
                "bytes_per_sample": None,
                "flops_per_sample": None,
                "coupled": tuple(getattr(self.task, "coupled", ())),
                "whole_batch": self.whole_batch,
                "frozen_base": self.frozen_base,
                "fingerprint": self.fingerprint(),
                "schedule": self._schedule_facts(),
                **described,
                **task_facts,
            }
        )

    def _describe_arrays(self, task_facts: Mapping[str, Any]) -> Mapping[str, Any]:
        """What follows from the shapes that the class tells: no blocks are known."""
        buffers = task_facts.get("buffers", ())
        sizes = {
            name: math.prod(shape)
            for name, shape in task_facts["arrays"].items()
            if name not in buffers
        }
        groups = self._config.optimizer.rules.describe(sizes)
        return {"params": sum(sizes.values()), "blocks": 0, **groups}

    def _check_rows(self) -> None:
        """UserError: a row is not the same when it is read again."""
        is_known = hasattr(self.task, "fingerprint")
        with self.calling("train_data"):
            self.train_data().check(is_known=is_known)
        if self._held_out is not None:
            with self.calling("eval_data"):
                self._held_out.check(is_known=is_known)
        if self._test is not None:
            with self.calling("test_data"):
                self._test.check(is_known=is_known)

    def _task_facts(self) -> dict[str, Any]:
        """What the class's own facts() gives."""
        if not hasattr(self.task, "facts"):
            return {}
        with self.calling("facts"):
            task_facts = dict(self.task.facts())
        known = {field.name for field in fields(Facts)}
        for name in task_facts:
            if name not in known:
                raise UserError(
                    f"{self.name}.facts() tells {name}, which no plan asks for",
                    suggest(str(name), sorted(known)) or f"known: {', '.join(sorted(known))}",
                    "task",
                )
        return task_facts

    def fingerprint(self) -> str:
        """Of the task or its training data, where they have a fingerprint() of their own.

        Else a hash over the number of samples and up to 16 of them, spread over the data.
        """
        if hasattr(self.task, "fingerprint"):
            with self.calling("fingerprint"):
                return str(self.task.fingerprint())
        with self.calling("train_data"):
            return self.train_data().fingerprint()

    def train_data(self) -> Rows:
        assert self._train is not None, "opened to use a trained model, without data"
        return self._train

    def eval_data(self) -> Rows | None:
        return self._held_out

    def test_data(self) -> Rows | None:
        return self._test

    def initial(self, name: str, shape: tuple[int, ...]) -> Initial | None:
        if not hasattr(self.task, "initial"):
            return None
        with self.calling("initial"):
            initial = self.task.initial(name, shape)
        if initial is not None and not isinstance(initial, Initial):
            raise UserError(
                f"{self.name}.initial({name}) returns {type(initial).__name__}",
                "samecurve.Initial(std, mean), or None to keep the module's own values",
                "task",
            )
        return initial

    @property
    def frozen_base(self) -> bool:
        """Whether the class says so."""
        return bool(getattr(self.task, "frozen_base", False))

    @property
    def init_module(self) -> Callable[[Any, Any], None] | None:
        """The class's own first values of a module; None: it has no such method."""
        if not hasattr(self.task, "init_module"):
            return None

        def init_module(model: Any, module: Any) -> None:
            with self.calling("init_module"):
                self.task.init_module(model, module)

        return init_module

    def export(self, model: Any, directory: Path) -> list[str]:
        """Lets the class write what belongs beside the weights. Returns lines for the user."""
        if not hasattr(self.task, "export"):
            return []
        with self.calling("export"):
            return list(self.task.export(model, directory) or [])

    def export_hf(
        self, tensors: Mapping[str, Any], directory: Path, dtype: str
    ) -> tuple[dict[str, Any], list[str]]:
        """The tensors under the Hugging Face names, and lines for the user.

        The class must have export_hf().
        """
        with self.calling("export_hf"):
            renamed, lines = self.task.export_hf(tensors, directory, dtype)
            return dict(renamed), list(lines)

    def export_adapter(
        self, tensors: Mapping[str, Any], directory: Path
    ) -> tuple[dict[str, Any], list[str]]:
        """As export_hf(), of the adapter alone. The class must have export_adapter()."""
        with self.calling("export_adapter"):
            renamed, lines = self.task.export_adapter(tensors, directory)
            return dict(renamed), list(lines)

    def assets(self) -> Mapping[str, Path]:
        if not hasattr(self.task, "assets"):
            return {}
        with self.calling("assets"):
            return dict(self.task.assets())

    def calling(
        self, method: str, kind: type[SamecurveError] = UserError
    ) -> AbstractContextManager[None]:
        """Around a call of a user's code: what it raises becomes an error that names its line."""
        if self._file is None:
            return nullcontext()
        return calling(f"{self.name}.{method}()", self._file, kind)

    def _checked_factor(self, step: int) -> float:
        """Of the learning rate, by the class's own schedule. UserError: it is none."""
        with self.calling("schedule"):
            factor = self.task_factor(step)
        if not isinstance(factor, int | float) or not 0 <= factor < math.inf:
            raise UserError(
                f"{self.name}.schedule() gives {factor!r} at step {step}",
                "a number of at least 0, by which optimizer.lr is multiplied",
                "task",
            )
        return float(factor)

    def task_factor(self, step: int) -> float:
        """What the class's schedule() says of a step."""
        if self._schedules_optimizer():
            raise UserError(
                f"{self.name}.schedule(optimizer) makes a torch scheduler, which this engine has"
                " no optimizer for",
                "def schedule(self, step): the factor of optimizer.lr at that step",
                "task",
            )
        factor: float = self.task.schedule(step)
        return factor

    def _schedules_optimizer(self) -> bool:
        """Whether schedule() asks for an optimizer. UserError: neither for that nor for a step."""
        names = list(inspect.signature(self.task.schedule).parameters)
        if names not in (["step"], ["optimizer"]):
            raise UserError(
                f"{self.name}.schedule() asks for {', '.join(names) or 'nothing'}",
                MEMBERS["schedule"],
                "task",
            )
        return names == ["optimizer"]

    def _schedule_facts(self) -> str:
        """The class's own schedule in words: what it gives at some steps, as far as it goes."""
        if not hasattr(self.task, "schedule"):
            return ""
        shown = [f"{self._checked_factor(0):.4g} at step 0"]
        for step in (10, 100, 1000):
            try:
                shown.append(f"{self._checked_factor(step):.4g} at {step}")
            except UserError:  # a run tries its own last step before the first
                break
        return f"{self.name}.schedule(): {', '.join(shown)}"


def _instance(task_class: type, arguments: Mapping[str, Any]) -> Any:
    """Called with what its __init__ asks for by name; else with both sections, in their order."""
    parameters = inspect.signature(task_class).parameters
    sections = {name: arguments[name] for name in ("model", "data")}
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return task_class(**sections)
    named = {name: value for name, value in arguments.items() if name in parameters}
    if named or not parameters:
        return task_class(**named)
    return task_class(*sections.values())


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """The global generators begin at the seed, so that every process draws the same values.

    They are put back afterwards.
    """
    torch: Any = sys.modules.get("torch")  # if the task's file has imported it
    python_state, numpy_state = random.getstate(), np.random.get_state()
    torch_state = torch and torch.random.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if torch:
        torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        if torch:
            torch.random.set_rng_state(torch_state)
