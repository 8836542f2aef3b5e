"""A task's class as engines see a task (core.protocols.Task), as far as no engine is needed.

torch_adapter.py and jax_adapter.py bring the rest.
"""

import inspect
import math
import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from samecurve.core.config.document import suggest
from samecurve.core.config.sections import Config
from samecurve.core.determinism.init_values import Initial
from samecurve.core.determinism.mean import Mean
from samecurve.core.eval_sums import EvalSums, Metric, SumSpec, SumSpecs
from samecurve.core.planning.facts import Facts
from samecurve.core.protocols import START, Arrays, Progress, Sample, StoredArrays
from samecurve.core.step_logger import STEP_VALUES
from samecurve.errors import SamecurveError, UserError
from samecurve.observe.pictures import check_picture
from samecurve.tasks.adapter.columns import Collation
from samecurve.tasks.adapter.members import check_names, check_signatures, other_trainers
from samecurve.tasks.adapter.rows import Rows
from samecurve.tasks.protocol import MEMBERS
from samecurve.tasks.registry import section_argument
from samecurve.tasks.user_file import calling

_RESERVED = {"best_loss", "best_step", "seconds"}  # names in the journal's lines
FEATURES = (
    "return {name: tensor with one row a sample}: a number of the model for all samples as"
    " model.scale.expand(len(x)), sums over a sample's tokens as one row each"
)
NEEDED = {name: MEMBERS[name] for name in ("model", "loss", "train_data")}
WHOLE_BATCH = {name: MEMBERS[name] for name in ("features", "batch_loss")}  # in place of loss()


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
        self._asks: dict[str, set[str]] = {}  # by method
        self.phases: Mapping[str, tuple[str, ...]] = {}  # of a step: patterns of parameters
        self._train: Rows | None = None
        self._held_out: Rows | None = None
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
            self._check_members()
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
                "tokens_per_sample": 1,
                "bytes_per_sample": None,
                "flops_per_sample": None,
                "coupled": tuple(getattr(self.task, "coupled", ())),
                "whole_batch": self.whole_batch,
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

    def _check_members(self) -> None:
        """UserError: what is missing, all at once, or is of another form."""
        self._check_hidden()
        self._check_needed()
        if self._file is not None:
            check_names(self.task, self.name)
            check_signatures(self.task, self.name)
        if callable(getattr(self.task, "loss", None)):
            self.phases = self._read_phases()
        task, name = self.task, self.name
        if hasattr(task, "optimizer") and not callable(task.optimizer):
            raise UserError(
                f"{name}.optimizer is {type(task.optimizer).__name__}, where a method"
                " optimizer(self, params) brings an optimizer",
                "another name for it",
                "task",
            )
        if not isinstance(getattr(task, "elementwise", False), bool):
            raise UserError(
                f"{name}.elementwise is {task.elementwise!r}",
                "True: the optimizer updates each number by itself, whatever the others are; or"
                " leave it out",
                "task",
            )
        coupled = getattr(task, "coupled", ())
        if not isinstance(coupled, tuple | list) or not all(
            isinstance(word, str) for word in coupled
        ):
            raise UserError(
                f"{name}.coupled is {coupled!r}",
                'a tuple of words for what mixes the samples of a batch: ("contrastive loss",)',
                "task",
            )

    def _check_hidden(self) -> None:
        """UserError: __init__ has set a value under the name of a method."""
        for method in MEMBERS:
            value = getattr(self.task, "__dict__", {}).get(method)
            is_method = callable(getattr(type(self.task), method, None))
            if value is not None and is_method and not callable(value):
                raise UserError(
                    f"{self.name}.__init__ sets self.{method}, which hides the method {method}()",
                    f"keep it under another name, such as self.{method}_fields",
                    "task",
                )

    def _check_needed(self) -> None:
        """UserError: methods are missing, or there are two losses."""
        needed = self._needed_here()
        missing = [name for name in needed if not callable(getattr(self.task, name, None))]
        if not missing:
            return
        there = [name for name in dir(self.task) if not name.startswith("__")]
        hints = [hint for name in missing if (hint := suggest(name, there))]
        hints += [f"{name}() is called by other trainers" for name in other_trainers(self.task)]
        lacks = "; ".join([" and ".join(f"no {name}()" for name in missing), *hints])
        signatures = "\n    ".join(needed[name] for name in missing)
        raise UserError(f"{self.name} has {lacks}", signatures, "task")

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

    def _read_phases(self) -> dict[str, tuple[str, ...]]:
        """UserError: the class's phases are of another form, or its loss does not hear of them."""
        phases = getattr(self.task, "phases", {})
        if not isinstance(phases, Mapping):
            phases = {"": phases}
        read = {}
        for phase, patterns in phases.items():
            of_phase = (patterns,) if isinstance(patterns, str) else patterns
            is_list = isinstance(of_phase, tuple | list) and of_phase
            if not phase or not is_list or not all(isinstance(p, str) for p in of_phase):
                raise UserError(
                    f"{self.name}.phases is {self.task.phases!r}", MEMBERS["phases"], "task"
                )
            read[str(phase)] = tuple(of_phase)
        methods = ["features", "batch_loss"] if self.whole_batch else ["loss"]
        asks = [
            method
            for method in methods
            if "phase" in inspect.signature(getattr(self.task, method)).parameters
        ]
        if asks and not read:
            raise UserError(
                f"{self.name}.{asks[0]}() asks for a phase, and the class has no phases",
                MEMBERS["phases"],
                "task",
            )
        if read and not asks:
            raise UserError(
                f"{self.name} has phases ({', '.join(read)}), and its {methods[-1]}() does not ask"
                " which",
                f"phase among the parameters of {methods[-1]}(): the loss is that phase's",
                "task",
            )
        return read

    def _needed_here(self) -> Mapping[str, str]:
        """What this class must have. UserError: two losses.

        A method features() beside loss() is a helper of the class's own.
        """
        has_loss, has_features = hasattr(self.task, "loss"), hasattr(self.task, "features")
        if "loss" not in self.needed or not (self.whole_batch or (has_features and not has_loss)):
            return self.needed
        if has_loss:
            raise UserError(
                f"{self.name} has two losses, loss() and batch_loss()",
                "leave one of them out: loss() where the loss is a sum over samples; features() and"
                " batch_loss() where samples of a batch see each other",
                "task",
            )
        others = {name: text for name, text in self.needed.items() if name != "loss"}
        return {**others, **WHOLE_BATCH}


class EngineAdapter(TaskAdapter, ABC):
    """A task with the model of one engine."""

    engine: ClassVar[str]

    @abstractmethod
    def model(self) -> Any:
        """The class's model, built anew."""

    @abstractmethod
    def describe_model(self) -> Mapping[str, Any]: ...

    @abstractmethod
    def check_loss(self, loss: object, what: str) -> None:
        """UserError: it can't be added up and divided once."""

    @abstractmethod
    def check_features(self, features: object) -> None:
        """UserError: they are not arrays by name, with one row a sample."""

    @abstractmethod
    def metric_specs(self, row: Mapping[str, NDArray[Any]]) -> dict[str, Mean]:
        """What metrics() gives, learnt from one held-out row."""

    @abstractmethod
    def load(self, weights: StoredArrays) -> Any:
        """The model with these weights, by a checkpoint's names, in eval mode."""

    @abstractmethod
    def place(self, model: Any, device: str) -> Any:
        """The model on this device: cpu, cuda, cuda:1."""

    @abstractmethod
    def named_tensors(self, model: Any) -> dict[str, Any]:
        """A loaded model's weights as torch tensors, by the model's own names.

        Weights that are tied come under each of their names.
        """

    def loss(self, model: Any, batch: Arrays, progress: Progress = START) -> Mean:
        return self.losses(model, batch, progress)["loss"]

    def losses(
        self, model: Any, batch: Arrays, progress: Progress = START, phase: str = ""
    ) -> Mapping[str, Mean]:
        """The loss, as "loss", and what the class gives to be logged beside it."""
        returned = self.task.loss(model, batch, **self.asked("loss", progress, phase))
        return self._named(returned, "loss")

    def _named(self, returned: Any, method: str) -> Mapping[str, Mean]:
        """What a method gives as the loss, and to be logged beside it, checked."""
        losses: Mapping[str, Mean] = (
            returned if isinstance(returned, Mapping) else {"loss": returned}
        )
        if not self._loss_checked:
            self._check_logged(losses, method)
            self.check_loss(losses["loss"], f"{self.name}.{method}()")
        return losses

    def _check_logged(self, losses: Mapping[str, Mean], method: str) -> None:
        """UserError: what it gives beside the loss can't be added up and divided once."""
        for name, mean in losses.items():
            if not isinstance(name, str) or not name or name in STEP_VALUES:
                raise self._wrong_loss(
                    method, f"gives {name!r}, a name that is taken", "another name"
                )
            is_single = isinstance(mean, Mean) and not any(getattr(n, "ndim", 0) for n in mean)
            if name != "loss" and not is_single:
                raise self._wrong_loss(
                    method,
                    f'gives no single Mean as "{name}"',
                    "Mean(sum, weight), each a number or a tensor with one",
                )
        if "loss" not in losses:
            raise self._wrong_loss(
                method,
                f'gives {", ".join(losses)}, but no "loss"',
                'return {"loss": Mean(...), ...}: the others are logged beside it',
            )

    def _wrong_loss(self, method: str, cause: str, remedy: str) -> UserError:
        return UserError(f"{self.name}.{method}() {cause}", remedy, "task")

    def asked(
        self, method: str, progress: Progress = START, phase: str = "", **others: Any
    ) -> dict[str, Any]:
        """What a method of the class asks for by the names of its parameters.

        phase: '': the first
        """
        values = {"step": progress.step, "epoch": progress.epoch, **others}
        if self.phases:
            values["phase"] = phase or next(iter(self.phases))
        if method not in self._asks:
            self._asks[method] = set(inspect.signature(getattr(self.task, method)).parameters)
        return {name: value for name, value in values.items() if name in self._asks[method]}

    def features(
        self, model: Any, batch: Arrays, progress: Progress = START, phase: str = ""
    ) -> Arrays:
        """What the class's batch_loss() needs of a microbatch: one row a sample."""
        asked = self.asked("features", progress, phase)
        features: Arrays = self.task.features(model, batch, **asked)
        self.check_features(features)
        return features

    def batch_losses(
        self, features: Arrays, progress: Progress = START, phase: str = ""
    ) -> Mapping[str, Mean]:
        """The loss of a whole batch, and what is logged beside it."""
        returned = self.task.batch_loss(features, **self.asked("batch_loss", progress, phase))
        return self._named(returned, "batch_loss")

    def eval_sums(self) -> SumSpecs:
        return {
            f"{name}.{part}": spec
            for name, mean in self._metric_specs.items()
            for part, spec in zip(Mean._fields, mean, strict=True)
        }

    def evaluate(self, model: Any, batch: Arrays, progress: Progress = START) -> Mapping[str, Any]:
        """Sums and weights of one microbatch; the loss among them, as zeros where batch_loss()
        gives it.
        """
        metrics = self.measure(model, batch)
        if self.whole_batch:
            metrics = {"loss": Mean(0.0, 0.0), **metrics}
        elif "loss" not in metrics:
            metrics = {"loss": self.loss(model, batch, progress), **metrics}
        if metrics.keys() != self._metric_specs.keys():
            here = ", ".join(name for name in metrics if name != "loss")
            before = ", ".join(name for name in self._metric_specs if name != "loss")
            raise self._wrong_metrics(
                f"gives {here} for one batch and {before} for another",
                "the same names for every batch; a weight may be 0",
            )
        return {
            f"{name}.{part}": value
            for name, mean in metrics.items()
            for part, value in zip(Mean._fields, mean, strict=True)
        }

    def summarize(self, sums: EvalSums, /) -> dict[str, Metric]:
        """What is shown, from sums over all devices; the loss first."""
        totals = {
            name: Mean(sums[f"{name}.sum"], sums[f"{name}.weight"]) for name in self._metric_specs
        }
        if not hasattr(self.task, "summarize"):
            return {name: _shown(total) for name, total in totals.items()}
        with self.calling("summarize"):
            return {"loss": _shown(totals["loss"]), **self.task.summarize(totals)}

    def respond(
        self, model: Any, prompt: str, *, tokens: int, temperature: float, seed: int
    ) -> str:
        """The class's own answer to a prompt (it must have respond())."""
        with self.calling("respond"):
            return str(
                self.task.respond(model, prompt, tokens=tokens, temperature=temperature, seed=seed)
            )

    def sample(self, model: Any, seed: int) -> Sequence[Sample]:
        """Texts, and pictures as uint8 arrays; none, if the class has no sample()."""
        if not hasattr(self.task, "sample"):
            return []
        with self.calling("sample"):
            samples = list(self.task.sample(model, seed))
        for sample in samples:
            if not isinstance(sample, str):
                check_picture(sample)
        return samples

    @cached_property
    def _metric_specs(self) -> dict[str, Mean]:
        """What is added up of each metric, the loss first: SumSpecs in place of numbers.

        A rank without held-out rows of its own needs them too.
        """
        number = Mean(SumSpec(), SumSpec())
        names: Sequence[str] = getattr(self.task, "metric_names", ())
        specs = dict.fromkeys(names, number)
        if not names and hasattr(self.task, "metrics") and self._held_out is not None:
            specs = self.metric_specs(self._held_out[np.arange(1)])
        return {"loss": number, **specs}

    def measure(self, model: Any, batch: Arrays) -> Mapping[str, Mean]:
        """What metrics() gives, checked; the loss is among it only if the class gives it there."""
        metrics = self.task.metrics(model, batch) if hasattr(self.task, "metrics") else {}
        if not isinstance(metrics, Mapping):
            raise self._wrong_metrics(
                f"returns {type(metrics).__name__}", "a dict of name -> Mean(sum, weight)"
            )
        for name, mean in metrics.items():
            if name in _RESERVED or (name == "loss" and self.whole_batch):
                raise self._wrong_metrics(f'gives "{name}", a name that is taken', "another name")
            if not isinstance(mean, Mean) or not _can_be_added(mean):
                raise self._wrong_metrics(
                    f'gives no single Mean as "{name}"',
                    "Mean(sum, weight), each a number or a tensor with one, or the sum an array of"
                    " whole numbers (counts); both are added over all devices and divided once",
                )
        return metrics

    def _wrong_metrics(self, cause: str, remedy: str) -> UserError:
        return UserError(f"{self.name}.metrics() {cause}", remedy, "task")


def spec_of(mean: Mean) -> Mean:
    """What is added up of a metric: an array of whole numbers is counted exactly."""
    shape = tuple(getattr(mean.sum, "shape", ()))
    return Mean(SumSpec(shape, integer=bool(shape) and _is_whole(mean.sum)), SumSpec())


def _can_be_added(mean: Mean) -> bool:
    return getattr(mean.weight, "ndim", 0) == 0


def _is_whole(array: Any) -> bool:
    """Of integers or booleans, whichever library's array it is."""
    return any(kind in str(array.dtype) for kind in ("int", "bool"))


def _shown(total: Mean) -> Metric:
    """Sum / weight; counts as they are."""
    if isinstance(total.sum, np.ndarray) and _is_whole(total.sum):
        return total.sum
    if not total.weight:
        return math.nan
    quotient: Metric = total.sum / total.weight
    return quotient


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
