"""A task as far as no engine is needed: its data, its schedule, what plan() must know.

engine_adapter.py adds the model; together they are what engines see (core.protocols.Task).
"""

import inspect
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from samecurve.core.config.document import suggest
from samecurve.core.config.sections import Config, section_argument
from samecurve.core.planning.facts import Facts
from samecurve.core.protocols import Initial, Part
from samecurve.errors import RunError, SamecurveError, UserError
from samecurve.tasks.adapter.class_checks import check_attributes, check_methods, read_phases
from samecurve.tasks.adapter.rows import Rows
from samecurve.tasks.protocol import MEMBERS, ExportedFile, Method, TaskMethods
from samecurve.tasks.user_class.user_errors import UserCall, calling

if TYPE_CHECKING:
    from samecurve.tasks.adapter.columns import Collation


class TaskAdapter:
    """A task's object, made from its class, with its data open.

    task_class: as people write it (tasks/protocol.py)
    config: the whole config
    cache: a directory where the task may keep what it prepares
    assets: the files that a run keeps of its task, where the task is opened to use a trained
        model; a class whose __init__ asks for them is then opened without its data
    file: the user's file, whose lines its errors name; None: the code is ours

    task: the object itself
    methods: its members, looked up once
    phases: the patterns of parameters that each phase of a step trains; empty: one update a step
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
        self.name, self._file, self._config = task_class.__name__, file, config
        self._train: Rows | None = None
        self._held_out: Rows | None = None
        self._test: Rows | None = None
        arguments = {
            "model": section_argument(config.model),
            "data": section_argument(config.data),
            "cache": Path(cache),
            "assets": assets,
            "engine": config.engine,
            "seed": config.train.seed,
        }
        with _seeded(config.train.seed):
            with self.calling("__init__"):
                self.task = _instance(task_class, arguments)
            check_methods(self.task, self.name, self.needed, is_users=file is not None)
            self.methods = TaskMethods.of(self.task)
            self.phases = read_phases(self.methods, self.name)
            check_attributes(self.methods, self.name)
            self._loss_worked = False
            steps = ("loss", "features", "batch_loss", "metrics")
            self._loss, self._features, self._batch_loss, self._metrics = map(self._call_of, steps)
            if assets is None or "assets" not in inspect.signature(task_class).parameters:
                self._train = self._rows("train_data")
                self._held_out = self._rows("eval_data")
                self._test = self._rows("test_data")

    def _call_of(self, method: str) -> UserCall:
        """The call of a method. Once a loss has worked, an error is the run's (RunError)."""
        return UserCall(
            getattr(self.methods, method),
            f"{self.name}.{method}()",
            file=self._file,
            kind=lambda: RunError if self._loss_worked else UserError,
            phases=self.phases,
        )

    @property
    def is_ours(self) -> bool:
        """Whether the class is this program's own, whose errors are not explained as a user's."""
        return self._file is None

    @property
    def whole_batch(self) -> bool:
        """Whether the class has a loss over the whole batch's features in place of loss()."""
        return self.methods.batch_loss is not None

    def _rows(self, method: str) -> Rows | None:
        """The data that one of the class's methods gives; None: it has none."""
        with self.calling(method):
            data = getattr(self.methods, method)()
            if data is None and method != "train_data":
                return None
            return Rows(data, f"{self.name}.{method}()", self._file, self._collation())

    def _collation(self) -> "Collation | None":
        """How samples of unlike length become arrays. UserError: this engine can't have that."""
        collate = self.methods.collate
        if collate is None:
            return None
        name = f"{self.name}.collate()"
        if self._config.engine == "jax":
            raise UserError(
                f"{name}: engine jax compiles its step for one shape of row, which padding by"
                " microbatch would change from step to step",
                "pad the rows to one length in the data, and take collate() out; or --engine torch",
                "task",
            )
        from samecurve.tasks.adapter.columns import Collation

        return Collation(collate, name)

    @cached_property
    def own_facts(self) -> Mapping[str, Any]:
        """The result of the class's own facts(). UserError: no plan asks for one of them."""
        with self.calling("facts"):
            own = dict(self.methods.facts())
        known = Facts.keys()
        for name in own:
            if name not in known:
                near = suggest(str(name), sorted(known))
                remedy = near or f"known: {', '.join(sorted(known))}"
                raise self._wrong("facts", f"tells {name}, which no plan asks for", remedy)
        return own

    def facts(self) -> Facts:
        """The facts that plan() needs: what the class tells, and what is found beside it.

        Without an engine no model can be built, so the class must tell its `arrays`.
        """
        if self.methods.prepare is None:  # else the rows can be read once their files are made
            self.check_rows()
        return Facts.of(
            **{
                "samples": len(self.train_data()),
                "eval_samples": len(self._held_out) if self._held_out else 0,
                "test_samples": len(self._test) if self._test else 0,
                "buckets": self._buckets(),
                "tokens_per_sample": 1,
                "bytes_per_sample": None,
                "flops_per_sample": None,
                "coupled": tuple(self.methods.coupled),
                "whole_batch": self.whole_batch,
                "frozen_base": self.frozen_base,
                "fingerprint": self.fingerprint(),
                "schedule": self._schedule_facts(),
                **self._model_facts(),
                **self.own_facts,
            }
        )

    def _buckets(self) -> Mapping[str, tuple[int, ...]]:
        """The samples of each bucket, of the data whose rows lie in buckets."""
        sources = {"train": self._train, "eval": self._held_out, "test": self._test}
        return {
            which: rows.bucket_sizes
            for which, rows in sources.items()
            if rows and rows.bucket_sizes
        }

    def _model_facts(self) -> Mapping[str, Any]:
        """The fields about the model that follow from told shapes; no blocks are known."""
        buffers = self.own_facts.get("buffers", ())
        sizes = {
            name: math.prod(shape)
            for name, shape in self.own_facts["arrays"].items()
            if name not in buffers
        }
        groups = self._config.optimizer.rules.describe(sizes)
        return {"params": sum(sizes.values()), "blocks": 0, **groups}

    def check_rows(self) -> None:
        """UserError: a row is not the same when it is read again.

        Rows of our own tasks that have a fingerprint() are not read: our tests hold them.
        """
        if self._file is None and self.methods.fingerprint is not None:
            return
        sources = {
            "train_data": self.train_data(),
            "eval_data": self._held_out,
            "test_data": self._test,
        }
        for method, rows in sources.items():
            if rows is not None:
                with self.calling(method):
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
            with self.calling("fingerprint"):
                own = str(self.methods.fingerprint())
        if self._file is None or self.methods.prepare is not None:
            return own
        with self.calling("train_data"):
            return self.train_data().with_rows(own)

    def train_data(self) -> Rows:
        assert self._train is not None, "opened to use a trained model, without data"
        return self._train

    def eval_data(self) -> Rows | None:
        return self._held_out

    def test_data(self) -> Rows | None:
        return self._test

    def initial(self, name: str, shape: tuple[int, ...]) -> Initial | None:
        """The class's rule for a parameter's first values; None: the module's own values.

        UserError: what the class returns is no samecurve.Initial.
        """
        with self.calling("initial"):
            initial = self.methods.initial(name, shape)
        if initial is not None and not isinstance(initial, Initial):
            cause = f"{self.name}.initial({name}) returns {type(initial).__name__}"
            remedy = "samecurve.Initial(std, mean), or None to keep the module's own values"
            raise UserError(cause, remedy, "task")
        return initial

    @property
    def frozen_base(self) -> bool:
        """Whether what the model does not train comes from elsewhere, and is not saved."""
        return self.methods.frozen_base

    @property
    def init_module(self) -> Callable[[Any, Any], None] | None:
        """The class's own first values of a module; None: it has no such method."""
        method = self.methods.init_module
        if method is None:
            return None

        def init_module(model: Any, module: Any) -> None:
            with self.calling("init_module"):
                method(model, module)

        return init_module

    @property
    def prepare(self) -> Callable[[Any, Part], Iterator[tuple[int, int]]] | None:
        """The class's own prepare(), which makes files that rows need; None: it has none."""
        return self._prepare if self.methods.prepare is not None else None

    @property
    def prepared_files(self) -> str:
        """What the files of prepare() hold, in words that follow "files"; '' if it is not said."""
        return str(getattr(self.task, "prepared_files", ""))

    def _prepare(self, device: Any, part: Part) -> Iterator[tuple[int, int]]:
        assert self.methods.prepare is not None
        with self.calling("prepare"):
            yield from self.methods.prepare(device, part)

    def export(self, model: Any, directory: Path) -> list[str]:
        """Let the class write what belongs beside the weights. Returns lines for the user."""
        with self.calling("export"):
            return list(self.methods.export(model, directory) or [])

    def export_hf(
        self, tensors: Mapping[str, Any], directory: Path, dtype: str
    ) -> tuple[dict[str, Any], list[str]]:
        """The tensors under the Hugging Face names, and lines for the user.

        The class must have export_hf().
        """
        assert self.methods.export_hf is not None
        with self.calling("export_hf"):
            renamed, lines = self.methods.export_hf(tensors, directory, dtype)
            return dict(renamed), list(lines)

    def export_adapter(
        self, tensors: Mapping[str, Any], directory: Path
    ) -> tuple[dict[str, Any], list[str]]:
        """The tensors of the adapter alone under the names of peft, and lines for the user.

        The class must have export_adapter().
        """
        assert self.methods.export_adapter is not None
        with self.calling("export_adapter"):
            renamed, lines = self.methods.export_adapter(tensors, directory)
            return dict(renamed), list(lines)

    def export_as(
        self, form: str, tensors: Mapping[str, Any], directory: Path, dtype: str
    ) -> ExportedFile:
        """The weights in one of the class's own formats. The class must have export_as()."""
        assert self.methods.export_as is not None
        with self.calling("export_as"):
            exported: ExportedFile = self.methods.export_as(form, tensors, directory, dtype)
        return exported

    def assets(self) -> Mapping[str, Path]:
        """The files that a run keeps, by name, so that its model can be used later."""
        with self.calling("assets"):
            return dict(self.methods.assets())

    def calling(
        self, method: str, kind: type[SamecurveError] = UserError
    ) -> AbstractContextManager[None]:
        """Surround a call of a user's code: what it raises becomes an error that names its line."""
        return calling(f"{self.name}.{method}()", self._file, kind)

    def _wrong(self, method: str, cause: str, remedy: str) -> UserError:
        return UserError(f"{self.name}.{method}() {cause}", remedy, "task")

    @property
    def lr_factor(self) -> Callable[[int], float] | None:
        """The factor of the learning rate by the class's own schedule; None: the config's holds."""
        return self._checked_factor if self.methods.schedule is not None else None

    def _checked_factor(self, step: int) -> float:
        """The class's own factor at a step. UserError: it is no number of at least 0."""
        with self.calling("schedule"):
            factor = self._factor(step)
        if not isinstance(factor, int | float) or not 0 <= factor < math.inf:
            remedy = "a number of at least 0, by which optimizer.lr is multiplied"
            raise self._wrong("schedule", f"gives {factor!r} at step {step}", remedy)
        return float(factor)

    @cached_property
    def _factor(self) -> Callable[[int], float]:
        """The class's schedule of steps. UserError: it asks for something else than step."""
        assert self.methods.schedule is not None
        names = list(inspect.signature(self.methods.schedule).parameters)
        if names == ["optimizer"]:
            return self.scheduler_factors(self.methods.schedule)
        if names != ["step"]:
            cause = f"asks for {', '.join(names) or 'nothing'}"
            raise self._wrong("schedule", cause, MEMBERS["schedule"])
        return self.methods.schedule

    def scheduler_factors(self, schedule: Method) -> Callable[[int], float]:
        """The factors of a schedule(optimizer). UserError: this engine has no optimizer for it."""
        del schedule
        raise UserError(
            f"{self.name}.schedule(optimizer) makes a torch scheduler, which this engine has no"
            " optimizer for",
            "def schedule(self, step): the factor of optimizer.lr at that step",
            "task",
        )

    def _schedule_facts(self) -> str:
        """The class's own schedule in words: its factors at some steps, as far as it goes."""
        if self.methods.schedule is None:
            return ""
        shown = [f"{self._checked_factor(0):.4g} at step 0"]
        for step in (10, 100, 1000):
            try:
                shown.append(f"{self._checked_factor(step):.4g} at {step}")
            except UserError:  # a run tries its own last step before the first
                break
        return f"{self.name}.schedule(): {', '.join(shown)}"


def _instance(task_class: type, arguments: Mapping[str, Any]) -> Any:
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
def _seeded(seed: int) -> Iterator[None]:
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
