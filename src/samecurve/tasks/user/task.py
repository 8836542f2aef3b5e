"""A user's class as a Task, as far as no engine is needed; torch_task.py and jax_task.py bring
their own.
"""

import inspect
import math
import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from samecurve.core.config.document import suggest
from samecurve.core.config.sections import Optimizer, Precision
from samecurve.core.determinism.init_values import Initial
from samecurve.core.determinism.mean import Mean
from samecurve.core.eval_sums import EvalSums, SumSpec, SumSpecs
from samecurve.core.planning.facts import Facts
from samecurve.core.protocols import Arrays, Sample
from samecurve.errors import SamecurveError, UserError
from samecurve.tasks.user.fields import Place
from samecurve.tasks.user.loading import calling, load_class
from samecurve.tasks.user.rows import Rows

_OPTIONAL = ("eval_data", "metrics", "initial", "optimizer")
_TAKEN = {"loss", "best_loss", "best_step", "seconds"}  # names in the journal's lines
MEAN = (
    'return Mean(sum, weight): sum is the loss added over what was counted (reduction="sum"),'
    " weight is how much that was (len(x) samples, (labels != -100).sum() tokens). Both are added"
    " over all devices and divided once: a mean of means would depend on the number of devices"
)


class UserTask(ABC):
    """place: of the user's class.

    model, data: the config's own fields. precision: what the model is to compute in. seed: of what
    its constructor and data draw from global generators. optimizer: the config's section.
    """

    needed: ClassVar[dict[str, str]] = {
        "loss": (
            "loss(self, model, batch) -> samecurve.Mean: the loss added over what was counted, and"
            " how much that was"
        ),
        "train_data": (
            "train_data(self): a torch Dataset, or an object with __len__ and __getitem__(ids) ->"
            " {name: array with one row an id}"
        ),
    }

    def __init__(
        self,
        place: Place,
        model: Mapping[str, Any],
        data: Mapping[str, Any],
        precision: Precision,
        seed: int,
        optimizer: Optimizer,
    ) -> None:
        self._place, self._precision, self._seed, self._optimizer, self._checked = (
            place,
            precision,
            seed,
            optimizer,
            False,
        )
        made = load_class(place)
        with _seeded(seed):
            with self._calling("__init__"):
                self._own = _instance(made, model, data)
            self._check_methods()
            with self._calling("train_data"):
                self._train = Rows(self._own.train_data(), f"{place.name}.train_data()", place.path)
            with self._calling("eval_data"):
                held_out = self._own.eval_data() if hasattr(self._own, "eval_data") else None
                self._held_out = (
                    None
                    if held_out is None
                    else Rows(held_out, f"{place.name}.eval_data()", place.path)
                )

    @abstractmethod
    def model(self) -> Any: ...

    @abstractmethod
    def describe(self) -> Mapping[str, Any]:
        """What Facts says of the model."""

    @abstractmethod
    def check_loss(self, found: object, what: str) -> None:
        """UserError: it can't be added up and divided once."""

    @abstractmethod
    def names_measured(self, row: Mapping[str, NDArray[Any]]) -> tuple[str, ...]:
        """The names of measured(), learnt from one held-out row."""

    def facts(self) -> Facts:
        with self._calling("train_data"):
            self._train.check()
        if self._held_out is not None:
            with self._calling("eval_data"):
                self._held_out.check()
        return Facts(
            samples=len(self._train),
            eval_samples=len(self._held_out) if self._held_out else 0,
            tokens_per_sample=1,
            bytes_per_sample=None,
            flops_per_sample=None,
            fingerprint=self.fingerprint(),
            **self.describe(),
        )

    def fingerprint(self) -> str:
        """Of the training data: its own fingerprint() where it has one, else a hash over its length
        and up to 16 rows spread over it.
        """
        with self._calling("train_data"):
            return self._train.fingerprint()

    def train_data(self) -> Rows:
        return self._train

    def eval_data(self) -> Rows | None:
        return self._held_out

    def initial(self, name: str, shape: tuple[int, ...]) -> Initial | None:
        if not hasattr(self._own, "initial"):
            return None
        with self._calling("initial"):
            found = self._own.initial(name, shape)
        if found is not None and not isinstance(found, Initial):
            raise UserError(
                f"{self._place.name}.initial({name}) returns {type(found).__name__}",
                "samecurve.Initial(std, mean), or None to keep the module's own values",
                "task",
            )
        return found

    def loss(self, model: Any, batch: Arrays) -> Mean:
        found: Mean = self._own.loss(model, batch)
        if not self._checked:
            self.check_loss(found, f"{self._place.name}.loss()")
        return found

    def eval_sums(self) -> SumSpecs:
        return {
            f"{name}.{part}": SumSpec()
            for name in ("loss", *self._metrics)
            for part in Mean._fields
        }

    def evaluate(self, model: Any, batch: Arrays) -> Mapping[str, Any]:
        found = {"loss": self.loss(model, batch), **self.measured(model, batch)}
        if found.keys() != {"loss", *self._metrics}:
            raise self._wrong_metrics(
                f"gives {', '.join(list(found)[1:])} for one batch and {', '.join(self._metrics)}"
                " for another",
                "the same names for every batch; a weight may be 0",
            )
        return {
            f"{name}.{part}": value
            for name, mean in found.items()
            for part, value in zip(Mean._fields, mean, strict=True)
        }

    def summarize(self, sums: EvalSums) -> dict[str, float]:
        means = {
            name: Mean(float(sums[f"{name}.sum"]), float(sums[f"{name}.weight"]))
            for name in ("loss", *self._metrics)
        }
        return {
            name: mean.sum / mean.weight if mean.weight else math.nan
            for name, mean in means.items()
        }

    def sample(self, model: Any, seed: int) -> Sequence[Sample]:
        return []

    def assets(self) -> Mapping[str, Path]:
        return {}

    @cached_property
    def _metrics(self) -> tuple[str, ...]:
        """A rank without held-out rows of its own needs the names too."""
        if not hasattr(self._own, "metrics") or self._held_out is None:
            return ()
        return self.names_measured(self._held_out[np.arange(1)])

    def measured(self, model: Any, batch: Arrays) -> Mapping[str, Mean]:
        found = self._own.metrics(model, batch) if hasattr(self._own, "metrics") else {}
        if not isinstance(found, Mapping):
            raise self._wrong_metrics(
                f"returns {type(found).__name__}", "a dict of name -> Mean(sum, weight)"
            )
        for name, mean in found.items():
            if name in _TAKEN:
                raise self._wrong_metrics(
                    f'gives "{name}", a name that is taken',
                    "another name; the loss is measured in any case",
                )
            if not isinstance(mean, Mean) or any(getattr(part, "ndim", 0) for part in mean):
                raise self._wrong_metrics(
                    f'gives no single Mean as "{name}"',
                    "Mean(sum, weight), each a number or a tensor with one; both are added over all"
                    " devices and divided once",
                )
        return found

    def _wrong_metrics(self, cause: str, remedy: str) -> UserError:
        return UserError(f"{self._place.name}.metrics() {cause}", remedy, "task")

    def _calling(
        self, method: str, kind: type[SamecurveError] = UserError
    ) -> AbstractContextManager[None]:
        return calling(f"{self._place.name}.{method}()", self._place.path, kind)

    def _check_methods(self) -> None:
        """UserError: what is missing, all at once."""
        own, name, needed = self._own, self._place.name, self.needed
        missing = [method for method in needed if not callable(getattr(own, method, None))]
        hidden = [
            method
            for method in (*needed, *_OPTIONAL)
            if method in getattr(own, "__dict__", {})
            and callable(getattr(type(own), method, None))
            and not callable(getattr(own, method))
        ]
        if hidden:
            raise UserError(
                f"{name}.__init__ sets self.{hidden[0]}, which hides the method {hidden[0]}()",
                f"keep it under another name, such as self.{hidden[0]}_fields",
                "task",
            )
        if missing:
            near = [
                hint
                for method in missing
                if (
                    hint := suggest(
                        method, [found for found in dir(own) if not found.startswith("__")]
                    )
                )
            ]
            lacks = "; ".join([" and ".join(f"no {method}()" for method in missing), *near])
            raise UserError(
                f"{name} has {lacks}",
                "".join(f"\n    {needed[method]}" for method in missing).removeprefix("\n    "),
                "task",
            )
        if hasattr(own, "optimizer") and not callable(own.optimizer):
            raise UserError(
                f"{name}.optimizer is {type(own.optimizer).__name__}, where a method"
                " optimizer(self, params) brings an optimizer",
                "another name for it",
                "task",
            )
        if not isinstance(getattr(own, "elementwise", False), bool):
            raise UserError(
                f"{name}.elementwise is {own.elementwise!r}",
                "True: the optimizer updates each number by itself, whatever the others are; or"
                " leave it out",
                "task",
            )
        mixing = getattr(own, "coupled", ())
        if not isinstance(mixing, tuple | list) or not all(
            isinstance(word, str) for word in mixing
        ):
            raise UserError(
                f"{name}.coupled is {mixing!r}",
                'a tuple of words for what mixes the samples of a batch: ("contrastive loss",)',
                "task",
            )


def _instance(made: type, model: Mapping[str, Any], data: Mapping[str, Any]) -> Any:
    """Called with the fields that its __init__ asks for, by name where it names them."""
    takes = inspect.signature(made).parameters
    given = {"model": dict(model), "data": dict(data)}
    named = {
        name: fields
        for name, fields in given.items()
        if name in takes or any(p.kind is p.VAR_KEYWORD for p in takes.values())
    }
    if not takes or named:
        return made(**named)
    return made(*given.values())


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """The global generators begin at the seed, so that every process draws the same, and are put
    back afterwards.
    """
    torch: Any = sys.modules.get("torch")  # if the user's file has imported it
    kept, kept_numpy, kept_torch = (
        random.getstate(),
        np.random.get_state(),
        torch and torch.random.get_rng_state(),
    )
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if torch:
        torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(kept)
        np.random.set_state(kept_numpy)
        if torch:
            torch.random.set_rng_state(kept_torch)
