"""A task with the model of one engine: its losses and metrics, as engines take them.

What a class's methods return is checked each time. torch_adapter.py and jax_adapter.py know the
model.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from samecurve.core.determinism.mean import NEGATIVE_WEIGHT_REMEDY, Mean
from samecurve.core.evaluation import EvalSums, Metric, SumSpec, SumSpecs
from samecurve.core.events import BESIDE_METRICS
from samecurve.core.planning.facts import DescribedArrays
from samecurve.core.protocols import (
    START,
    WHOLE,
    Arrays,
    Part,
    Progress,
    Sample,
    StoredArrays,
)
from samecurve.core.step_logger import STEP_VALUES
from samecurve.errors import UserError
from samecurve.tasks.adapter.data_kinds import parameters_of
from samecurve.tasks.adapter.task_adapter import TaskAdapter

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
    def describe_model(self) -> Mapping[str, Any]:
        """The fields of Facts about the model, found by building it without its values."""

    def _model_facts(self) -> Mapping[str, Any]:
        return super()._model_facts() if "arrays" in self.own_facts else self.describe_model()

    @abstractmethod
    def check_loss(self, loss: object, what: str) -> None:
        """UserError: what a method returns as the loss can't be added up and divided once.

        what: the method, for errors
        """

    @abstractmethod
    def check_features(self, features: object) -> None:
        """UserError: what features() returns is not arrays by name, with one row a sample."""

    @abstractmethod
    def metric_specs(self, row: Mapping[str, NDArray[Any]]) -> dict[str, Mean]:
        """The sums that metrics() gives, learnt from one held-out row."""

    @abstractmethod
    def load(self, weights: StoredArrays) -> Any:
        """The model with these weights, by a checkpoint's names, in eval mode."""

    def load_on_base(self, weights: StoredArrays, seed: int, digest: bytes, path: str) -> Any:
        """The model of a class with a frozen base, with these weights, in eval mode.

        weights: may lack arrays of the base, which then have their first values
        seed: the seed of those first values
        digest: the digest of the base that the weights were trained on
        path: where the weights lie, for errors

        UserError: it is another base.
        """
        del weights, seed, digest, path
        raise self._all_is_saved()

    def model_arrays(self) -> DescribedArrays:
        """The arrays of the model, which is built without values."""
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

    @property
    def optimizer(self) -> Callable[..., Any] | None:
        """The class's own optimizer; None: the config's."""
        return None

    @property
    def brings(self) -> Mapping[str, Any]:
        """The features that the class brings, with what their hooks take."""
        return {}

    def loss(self, model: Any, batch: Arrays, progress: Progress = START) -> Mean:
        return self.losses(model, batch, progress)["loss"]

    def losses(
        self, model: Any, batch: Arrays, progress: Progress = START, phase: str = ""
    ) -> Mapping[str, Mean]:
        """The loss of a microbatch, as "loss", and what the class gives to be logged beside it."""
        return self._named(self._loss(model, batch, progress=progress, phase=phase), "loss")

    def _named(self, returned: Any, method: str) -> Mapping[str, Mean]:
        """The loss that a method has returned, and what is logged beside it, checked."""
        losses: Mapping[str, Mean] = (
            returned if isinstance(returned, Mapping) else {"loss": returned}
        )
        self._check_logged(losses, method)
        self.check_loss(losses["loss"], f"{self.name}.{method}()")
        return losses

    def _check_logged(self, losses: Mapping[str, Mean], method: str) -> None:
        """UserError: a Mean beside the loss has no free name, or can't be added up."""
        for name, mean in losses.items():
            if not isinstance(name, str) or not name or name in STEP_VALUES:
                raise self._wrong(method, f"gives {name!r}, a name that is taken", "another name")
            is_single = isinstance(mean, Mean) and not any(getattr(n, "ndim", 0) for n in mean)
            if name != "loss" and not is_single:
                raise self._wrong(
                    method,
                    f'gives no single Mean as "{name}"',
                    "Mean(sum, weight), each a number or a tensor with one",
                )
        if "loss" not in losses:
            raise self._wrong(
                method,
                f'gives {", ".join(losses)}, but no "loss"',
                'return {"loss": Mean(...), ...}: the others are logged beside it',
            )

    @property
    def follows_progress(self) -> bool:
        """Whether the loss asks for the step or the epoch."""
        calls = [self._features, self._batch_loss] if self.whole_batch else [self._loss]
        return any(call.asks & {"step", "epoch"} for call in calls)

    def arguments_of(
        self, method: str, progress: Progress = START, phase: str = "", **others: Any
    ) -> dict[str, Any]:
        """The arguments that a method of the class asks for by name.

        phase: '': the first
        """
        values = {"step": progress.step, "epoch": progress.epoch, **others}
        if self.phases:
            values["phase"] = phase or next(iter(self.phases))
        parameters = parameters_of(getattr(self.methods, method))
        return {name: value for name, value in values.items() if name in parameters}

    def features(
        self, model: Any, batch: Arrays, progress: Progress = START, phase: str = ""
    ) -> Arrays:
        """The features of a microbatch, which batch_loss() takes: one row a sample."""
        features: Arrays = self._features(model, batch, progress=progress, phase=phase)
        self.check_features(features)
        return features

    def batch_losses(
        self, features: Arrays, progress: Progress = START, phase: str = ""
    ) -> Mapping[str, Mean]:
        """The loss of a whole batch, and what is logged beside it."""
        returned = self._batch_loss(features, progress=progress, phase=phase)
        return self._named(returned, "batch_loss")

    def eval_sums(self) -> SumSpecs:
        return {
            f"{name}.{part}": spec
            for name, mean in self._metric_specs.items()
            for part, spec in zip(Mean._fields, mean, strict=True)
        }

    def evaluate(self, model: Any, batch: Arrays, progress: Progress = START) -> Mapping[str, Any]:
        """Sums and weights of one microbatch, the loss first.

        Where batch_loss() gives the loss, it has zeros here.
        """
        metrics = self.measure(model, batch)
        if self.whole_batch:
            metrics = {"loss": Mean(0.0, 0.0), **metrics}
        elif "loss" not in metrics:
            metrics = {"loss": self.loss(model, batch, progress), **metrics}
        if metrics.keys() != self._metric_specs.keys():
            here = ", ".join(name for name in metrics if name != "loss")
            before = ", ".join(name for name in self._metric_specs if name != "loss")
            raise self._wrong(
                "metrics",
                f"gives {here} for one batch and {before} for another",
                "the same names for every batch; a weight may be 0",
            )
        return {
            f"{name}.{part}": value
            for name, mean in metrics.items()
            for part, value in zip(Mean._fields, mean, strict=True)
        }

    def summarize(self, sums: EvalSums, /) -> dict[str, Metric]:
        """The metrics that are shown, from sums over all devices; the loss first."""
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
        if self.methods.summarize is None:
            return {name: _shown(total) for name, total in totals.items()}
        with self.calling("summarize"):
            return {"loss": _shown(totals["loss"]), **self.methods.summarize(totals)}

    def respond(self, model: Any, prompt: str, **settings: Any) -> str:
        """The answer to a prompt by the class's respond(), which must be there.

        settings: tokens, temperature, seed, and chat if the method takes it
        """
        assert self.methods.respond is not None
        with self.calling("respond"):
            return str(self.methods.respond(model, prompt, **settings))

    @property
    def samples_in_parts(self) -> bool:
        """Whether the class's sample() asks which part of the samples it is to make."""
        method = self.methods.sample
        return method is not None and "part" in parameters_of(method)

    def sample(
        self,
        model: Any,
        seed: int,
        part: Part = WHOLE,
        step: int = 0,
        *,
        prompt: str | None = None,
    ) -> Sequence[Sample]:
        """Texts, and pictures as uint8 arrays; none if the class has no sample().

        seed: the run's seed + step. part: of the samples, where samples_in_parts
        prompt: what is to be shown, where the class asks for it; None: what the config says
        """
        if self.methods.sample is None:
            return []
        known = {"part": part, "step": step, "prompt": prompt}
        asked = parameters_of(self.methods.sample)
        arguments = {name: value for name, value in known.items() if name in asked}
        with self.calling("sample"):
            samples = list(self.methods.sample(model, seed, **arguments))
        pictures = [sample for sample in samples if not isinstance(sample, str)]
        if pictures:
            from samecurve.observe.pictures import check_picture

            for picture in pictures:
                check_picture(picture)
        return samples

    @cached_property
    def _metric_specs(self) -> dict[str, Mean]:
        """The form of each metric's sums, the loss first: SumSpecs in place of numbers.

        A rank without held-out rows of its own needs them too.
        """
        number = Mean(SumSpec(), SumSpec())
        names = self.methods.metric_names
        shapes = names if isinstance(names, Mapping) else dict.fromkeys(names, ())
        specs = {
            name: Mean(SumSpec(tuple(shape), integer=bool(shape)), SumSpec())
            for name, shape in shapes.items()
        }
        rows = self._train if self._held_out is None else self._held_out  # as eval -d reads them
        if not names and self.methods.metrics is not None and rows is not None:
            specs = self.metric_specs(rows[np.arange(1)])
        return {"loss": number, **specs}

    def measure(self, model: Any, batch: Arrays) -> Mapping[str, Mean]:
        """The class's metrics, checked. The loss is one of them only if metrics() gives it."""
        if self.methods.metrics is None:
            return {}
        metrics: Mapping[str, Mean] = self._metrics(model, batch)
        if not isinstance(metrics, Mapping):
            raise self._wrong(
                "metrics",
                f"returns {type(metrics).__name__}",
                "a dict of name -> Mean(sum, weight)",
            )
        for name, mean in metrics.items():
            if name in BESIDE_METRICS or (name == "loss" and self.whole_batch):
                raise self._wrong(
                    "metrics", f'gives "{name}", a name that is taken', "another name"
                )
            if not isinstance(mean, Mean) or getattr(mean.weight, "ndim", 0) != 0:
                raise self._wrong(
                    "metrics",
                    f'gives no single Mean as "{name}"',
                    "Mean(sum, weight), each a number or a tensor with one, or the sum an array of"
                    " whole numbers (counts); both are added over all devices and divided once",
                )
        return metrics


def spec_of(mean: Mean) -> Mean:
    """The form of a metric's sum and weight: an array of whole numbers is counted exactly."""
    shape = tuple(getattr(mean.sum, "shape", ()))
    return Mean(SumSpec(shape, integer=bool(shape) and _is_whole(mean.sum)), SumSpec())


def _is_whole(array: Any) -> bool:
    """Whether an array, of whichever library, has integers or booleans."""
    return any(kind in str(array.dtype) for kind in ("int", "bool"))


def _shown(total: Mean) -> Metric:
    """The value that is shown of a total: sum / weight, and counts as they are."""
    if isinstance(total.sum, np.ndarray) and _is_whole(total.sum):
        return total.sum
    if not total.weight:
        return math.nan
    quotient: Metric = total.sum / total.weight
    return quotient
