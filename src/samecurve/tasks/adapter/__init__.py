"""A task as engines see it (core.protocols.Task), made from a class as people write it.

TaskAdapter fills in what the class leaves out, and checks each time what its methods return.
torch_adapter.py and jax_adapter.py add the model. TaskAdapter itself serves the part of a task that
needs no engine: its data, its schedule, what plan() must know.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from samecurve.core.config.document import suggest
from samecurve.core.determinism import Mean
from samecurve.core.evaluation import EvalSums, Metric, SumSpec, SumSpecs
from samecurve.core.planning.facts import DescribedArrays, Facts
from samecurve.core.protocols import (
    START,
    WHOLE,
    Arrays,
    Initial,
    Part,
    Progress,
    Sample,
    StoredArrays,
)
from samecurve.errors import UserError
from samecurve.tasks.adapter.opened_class import OpenedClass
from samecurve.tasks.adapter.returned import (
    check_metrics,
    check_named,
    parts_of,
    shown,
    totals_of,
)
from samecurve.tasks.protocol import Method

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from samecurve.tasks.adapter.own_schedule import OwnSchedule


class TaskAdapter(OpenedClass):
    """A task, made from its class, with its data open."""

    engine: ClassVar[str] = ""  # the engine that has the model; '': none

    @cached_property
    def whole_batch(self) -> bool:
        """Whether the class has a loss over the whole batch's features in place of loss()."""
        return self.methods.batch_loss is not None

    @property
    def frozen_base(self) -> bool:
        """Whether what the model does not train comes from elsewhere, and is not saved."""
        return bool(self.methods.frozen_base)

    # What plan() must know

    @cached_property
    def own_facts(self) -> Mapping[str, Any]:
        """The result of the class's own facts(). UserError: no plan asks for one of them."""
        own = dict(self.call("facts"))
        known = Facts.keys()
        for name in own:
            if name not in known:
                near = suggest(str(name), sorted(known))
                remedy = near or f"known: {', '.join(sorted(known))}"
                raise self.wrong("facts", f"tells {name}, which no plan asks for", remedy)
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
                "eval_samples": len(self.rows.get("eval", ())),
                "test_samples": len(self.rows.get("test", ())),
                "buckets": {at: of.bucket_sizes for at, of in self.rows.items() if of.bucket_sizes},
                "tokens_per_sample": 1,
                "bytes_per_sample": None,
                "flops_per_sample": None,
                "coupled": tuple(self.methods.coupled),
                "whole_batch": self.whole_batch,
                "frozen_base": self.frozen_base,
                "fingerprint": self.fingerprint(),
                "schedule": self.lr_factor.in_words() if self.lr_factor else "",
                **self._model_facts(),
                **self.own_facts,
            }
        )

    def _model_facts(self) -> Mapping[str, Any]:
        """The fields about the model. Those that follow from told shapes know no blocks."""
        if "arrays" not in self.own_facts:
            return self.describe_model()
        buffers = self.own_facts.get("buffers", ())
        arrays = self.own_facts["arrays"].items()
        sizes = {name: math.prod(shape) for name, shape in arrays if name not in buffers}
        groups = self.config.optimizer.rules.describe(sizes)
        return {"params": sum(sizes.values()), "blocks": 0, **groups}

    @cached_property
    def lr_factor(self) -> "OwnSchedule | None":
        """The factor of the learning rate by the class's own schedule; None: the config's holds."""
        if self.methods.schedule is None:
            return None
        from samecurve.tasks.adapter.own_schedule import OwnSchedule

        return OwnSchedule(self, self.scheduler_factors)

    def scheduler_factors(self, _schedule: Method) -> Callable[[int], float]:
        """The factors of a schedule(optimizer). UserError: this engine has no optimizer for it."""
        raise UserError(
            f"{self.name}.schedule(optimizer) makes a torch scheduler, which this engine has no"
            " optimizer for",
            "def schedule(self, step): the factor of optimizer.lr at that step",
            "task",
        )

    # The model: an engine's adapter has these, and some of what follows in its own way

    if TYPE_CHECKING:

        def model(self) -> Any: ...
        def describe_model(self) -> Mapping[str, Any]: ...
        def check_loss(self, loss: object, what: str) -> None: ...
        def check_features(self, features: object) -> None: ...
        def metric_specs(self, row: Mapping[str, "NDArray[Any]"]) -> dict[str, Mean]: ...
        def load(self, weights: StoredArrays) -> Any: ...
        def place(self, model: Any, device: str) -> Any: ...
        def named_tensors(self, model: Any) -> dict[str, Any]: ...

    def initial(self, name: str, shape: tuple[int, ...]) -> Initial | None:
        """The class's rule for a parameter's first values; None: the module's own values.

        UserError: what the class returns is no samecurve.Initial.
        """
        initial: object = self.call("initial", name, shape)
        if initial is not None and not isinstance(initial, Initial):
            cause = f"{self.name}.initial({name}) returns {type(initial).__name__}"
            remedy = "samecurve.Initial(std, mean), or None to keep the module's own values"
            raise UserError(cause, remedy, "task")
        return initial

    @property
    def init_module(self) -> Callable[[Any, Any], None] | None:
        """The class's own first values of a module; None: it has no such method."""
        return partial(self.call, "init_module") if self.methods.init_module is not None else None

    @property
    def optimizer(self) -> Callable[..., Any] | None:
        """The class's own optimizer; None: the config's."""
        return None

    @property
    def brings(self) -> Mapping[str, Any]:
        """The features that the class brings, with what their hooks take."""
        return {}

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

    # Losses and metrics

    @property
    def follows_progress(self) -> bool:
        """Whether the loss asks for the step or the epoch."""
        methods = ("features", "batch_loss") if self.whole_batch else ("loss",)
        return any(self.asked(method) & {"step", "epoch"} for method in methods)

    def loss(self, model: Any, batch: Arrays, progress: Progress = START) -> Mean:
        return self.losses(model, batch, progress)["loss"]

    def losses(
        self, model: Any, batch: Arrays, progress: Progress = START, phase: str = ""
    ) -> Mapping[str, Mean]:
        """The loss of a microbatch, as "loss", and what the class gives to be logged beside it."""
        asked = self.arguments_of("loss", progress, phase)
        return self.named_losses(self.call("loss", model, batch, **asked), "loss")

    def features(
        self, model: Any, batch: Arrays, progress: Progress = START, phase: str = ""
    ) -> Arrays:
        """The features of a microbatch, which batch_loss() takes: one row a sample."""
        asked = self.arguments_of("features", progress, phase)
        features: Arrays = self.call("features", model, batch, **asked)
        self.check_features(features)
        return features

    def batch_losses(
        self, features: Arrays, progress: Progress = START, phase: str = ""
    ) -> Mapping[str, Mean]:
        """The loss of a whole batch, and what is logged beside it."""
        asked = self.arguments_of("batch_loss", progress, phase)
        return self.named_losses(self.call("batch_loss", features, **asked), "batch_loss")

    def named_losses(self, returned: Any, method: str) -> Mapping[str, Mean]:
        """The loss that a method has returned, and what is logged beside it, checked."""
        losses: Mapping[str, Mean] = (
            returned if isinstance(returned, Mapping) else {"loss": returned}
        )
        check_named(losses, f"{self.name}.{method}()")
        self.check_loss(losses["loss"], f"{self.name}.{method}()")
        return losses

    def measure(self, model: Any, batch: Arrays) -> Mapping[str, Mean]:
        """The class's metrics, checked. The loss is one of them only if metrics() gives it."""
        if self.methods.metrics is None:
            return {}
        metrics = self.call("metrics", model, batch)
        check_metrics(metrics, f"{self.name}.metrics()", whole_batch=self.whole_batch)
        return metrics  # type: ignore[no-any-return]

    @cached_property
    def _metric_specs(self) -> dict[str, Mean]:
        """The form of each metric's sums, the loss first: SumSpecs in place of numbers.

        A rank without held-out rows of its own needs them too.
        """
        names = self.methods.metric_names
        shapes = names if isinstance(names, Mapping) else dict.fromkeys(names, ())
        specs = {
            name: Mean(SumSpec(tuple(shape), integer=bool(shape)), SumSpec())
            for name, shape in shapes.items()
        }
        rows = self.rows.get("eval") or self.rows.get("train")  # as eval -d reads them
        if not names and self.methods.metrics is not None and rows is not None:
            specs = self.metric_specs(rows[np.arange(1)])
        return {"loss": Mean(SumSpec(), SumSpec()), **specs}

    def eval_sums(self) -> SumSpecs:
        return parts_of(self._metric_specs)

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
            raise self.wrong(
                "metrics",
                f"gives {here} for one batch and {before} for another",
                "the same names for every batch; a weight may be 0",
            )
        return parts_of(metrics)

    def summarize(self, sums: EvalSums, /) -> dict[str, Metric]:
        """The metrics that are shown, from sums over all devices; the loss first."""
        totals = totals_of(sums, self._metric_specs)
        if self.methods.summarize is None:
            return {name: shown(total) for name, total in totals.items()}
        return {"loss": shown(totals["loss"]), **self.call("summarize", totals)}

    # What the trained model is used for

    @property
    def samples_in_parts(self) -> bool:
        """Whether the class's sample() asks which part of the samples it is to make."""
        return "part" in self.asked("sample")

    def generating(self) -> AbstractContextManager[object]:
        """Surround the calls in which a trained model makes texts and pictures."""
        return nullcontext()

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
        asked = {name: known[name] for name in known.keys() & self.asked("sample")}
        with self.generating():
            samples = list(self.call("sample", model, seed, **asked))
        pictures = [sample for sample in samples if not isinstance(sample, str)]
        if pictures:
            from samecurve.observe.pictures import check_picture

            for picture in pictures:
                check_picture(picture)
        return samples

    def respond(self, model: Any, prompt: str, **settings: Any) -> str:
        """The answer to a prompt by the class's respond(), which must be there.

        settings: tokens, temperature, seed, and chat if the method takes it
        """
        with self.generating():
            return str(self.call("respond", model, prompt, **settings))
