"""A task's class with the model of one engine: its losses and metrics, as engines take them.

What a class's methods return is checked on its first use. torch_adapter.py and jax_adapter.py know
the model.
"""

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from samecurve.core.determinism.mean import NEGATIVE_WEIGHT_REMEDY, Mean
from samecurve.core.evaluation.eval_sums import EvalSums, Metric, SumSpec, SumSpecs
from samecurve.core.planning.facts import DescribedArrays
from samecurve.core.protocols import START, Arrays, Progress, Sample, StoredArrays
from samecurve.core.step_logger import STEP_VALUES
from samecurve.errors import UserError
from samecurve.observe.pictures import check_picture
from samecurve.tasks.adapter.task_adapter import TaskAdapter

_RESERVED = {"best_loss", "best_value", "best_step", "seconds"}  # names in the journal's lines
FEATURES = (
    "return {name: tensor with one row a sample}: a number of the model for all samples as"
    " model.scale.expand(len(x)), sums over a sample's tokens as one row each"
)


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

    def load_on_base(self, weights: StoredArrays, seed: int, digest: bytes, path: str) -> Any:
        """load(), of a class with a frozen base.

        weights: what they lack of the base has its first values
        seed: of those
        digest: of the base that the weights were trained on; path: where they lie

        UserError: it is another base.
        """
        del weights, seed, digest, path
        raise self._all_is_saved()

    def model_arrays(self) -> DescribedArrays:
        """Of the model, built without values."""
        raise self._all_is_saved()

    def _all_is_saved(self) -> UserError:
        return UserError(
            f"{self.name}: engine {self.engine} saves all of a model",
            "--engine torch with a torch model",
            "task",
        )

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
        returned = self.task.loss(model, batch, **self.arguments_of("loss", progress, phase))
        return self._named(returned, "loss")

    def _named(self, returned: Any, method: str) -> Mapping[str, Mean]:
        """What a method gives as the loss, and to be logged beside it, checked."""
        losses: Mapping[str, Mean] = (
            returned if isinstance(returned, Mapping) else {"loss": returned}
        )
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

    @property
    def follows_progress(self) -> bool:
        """Whether the loss asks for the step or the epoch."""
        methods = ["features", "batch_loss"] if self.whole_batch else ["loss"]
        return any(self.arguments_of(method).keys() & {"step", "epoch"} for method in methods)

    def arguments_of(
        self, method: str, progress: Progress = START, phase: str = "", **others: Any
    ) -> dict[str, Any]:
        """What a method of the class asks for by the names of its parameters.

        phase: '': the first
        """
        values = {"step": progress.step, "epoch": progress.epoch, **others}
        if self.phases:
            values["phase"] = phase or next(iter(self.phases))
        if method not in self._parameters:
            self._parameters[method] = set(inspect.signature(getattr(self.task, method)).parameters)
        return {name: value for name, value in values.items() if name in self._parameters[method]}

    def features(
        self, model: Any, batch: Arrays, progress: Progress = START, phase: str = ""
    ) -> Arrays:
        """What the class's batch_loss() needs of a microbatch: one row a sample."""
        arguments = self.arguments_of("features", progress, phase)
        features: Arrays = self.task.features(model, batch, **arguments)
        self.check_features(features)
        return features

    def batch_losses(
        self, features: Arrays, progress: Progress = START, phase: str = ""
    ) -> Mapping[str, Mean]:
        """The loss of a whole batch, and what is logged beside it."""
        returned = self.task.batch_loss(
            features, **self.arguments_of("batch_loss", progress, phase)
        )
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
        for name, total in totals.items():
            if total.weight < 0:
                raise UserError(
                    f'the weights of "{name}" add up to {total.weight:g} in the evaluation',
                    NEGATIVE_WEIGHT_REMEDY,
                    "task",
                )
        if not hasattr(self.task, "summarize"):
            return {name: _shown(total) for name, total in totals.items()}
        with self.calling("summarize"):
            return {"loss": _shown(totals["loss"]), **self.task.summarize(totals)}

    def respond(
        self,
        model: Any,
        prompt: str,
        *,
        tokens: int,
        temperature: float,
        seed: int,
        **options: Any,
    ) -> str:
        """The class's own answer to a prompt (it must have respond(), which takes the options)."""
        with self.calling("respond"):
            return str(
                self.task.respond(
                    model, prompt, tokens=tokens, temperature=temperature, seed=seed, **options
                )
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
        rows = self._train if self._held_out is None else self._held_out  # as eval -d reads them
        if not names and hasattr(self.task, "metrics") and rows is not None:
            specs = self.metric_specs(rows[np.arange(1)])
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
