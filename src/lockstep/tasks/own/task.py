"""The adapter: a user's class as a Task."""

import inspect
import math
import random
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from lockstep.core.config import Config
from lockstep.core.facts import Facts
from lockstep.core.initial import Initial
from lockstep.core.mean import Mean
from lockstep.core.protocols import Arrays
from lockstep.errors import UserError
from lockstep.on_torch.build import blocks
from lockstep.on_torch.dropout import key_dropout, unkeyed
from lockstep.on_torch.norms import Rows as Keys
from lockstep.on_torch.norms import coupled
from lockstep.tasks.own.fields import Place, place_of
from lockstep.tasks.own.loading import calling, load_class
from lockstep.tasks.own.rows import Rows

_NEEDED = {
    "model": "model(self) -> torch.nn.Module: the model, built anew",
    "loss": "loss(self, model, batch) -> lockstep.Mean: the loss added over what was counted, and how much that was",
    "train_data": "train_data(self): a torch Dataset, or an object with __len__ and __getitem__(ids) -> {name: array with one row an id}",
}
_OPTIONAL = ("eval_data", "metrics", "initial")
_TAKEN = {"loss", "best_loss", "best_step", "seconds"}  # names in the journal's lines
_MEAN = ('return Mean(sum, weight): sum is the loss added over what was counted (reduction="sum"), weight is how much that was (len(x) samples, (labels != -100).sum() tokens). '
         "Both are added over all devices and divided once: a mean of means would depend on the number of devices")


class OwnTask:
    """place: of the user's class. model, data: the config's own fields. seed: of what its constructor and data draw from global generators."""

    def __init__(self, place: Place, model: Mapping[str, Any], data: Mapping[str, Any], seed: int) -> None:
        self._place, self._checked = place, False
        made = load_class(place)
        with _seeded(seed):
            with self._calling("__init__"):
                self._own = _instance(made, model, data)
            _check_methods(self._own, place.name)
            with self._calling("train_data"):
                self._train = Rows(self._own.train_data(), f"{place.name}.train_data()")
            with self._calling("eval_data"):
                held_out = self._own.eval_data() if hasattr(self._own, "eval_data") else None
                self._held_out = None if held_out is None else Rows(held_out, f"{place.name}.eval_data()")

    def facts(self) -> Facts:
        with self._calling("train_data"):
            self._train.check()
        if self._held_out is not None:
            with self._calling("eval_data"):
                self._held_out.check()
        model = self._outline()
        trainable = sum(_scalars(p) for p in model.parameters() if p.requires_grad)
        if not trainable:
            raise UserError(f"{self._place.name}.model() has no parameter to train", "nn.Parameters with requires_grad, in the module or its children", "task")
        parts = [sum(map(_scalars, block.parameters())) for block in blocks(model) or [model]]
        return Facts(
            samples=len(self._train), eval_samples=len(self._held_out) if self._held_out else 0, tokens_per_sample=1,
            params=sum(map(_scalars, model.parameters())), trainable=trainable, blocks=len(parts), block_params=max(parts),
            bytes_per_sample=None, flops_per_sample=None, coupled=(*getattr(self._own, "coupled", ()), *coupled(model)), fingerprint=self.fingerprint(),
            unkeyed=unkeyed(model), keyed=key_dropout(model, Keys(), 0),  # on this outline only, to learn their names
        )

    def fingerprint(self) -> str:
        """Of the training data: its own fingerprint() where it has one, else a hash over its length and up to 16 rows spread over it."""
        with self._calling("train_data"):
            return self._train.fingerprint()

    def train_data(self) -> Rows:
        return self._train

    def eval_data(self) -> Rows | None:
        return self._held_out

    def model(self) -> nn.Module:
        """RuntimeError: on the meta device, the user's code looks at values."""
        try:
            with self._calling("model"):
                made = self._own.model()
        except UserError as error:
            if torch.get_default_device().type == "meta":
                raise RuntimeError(error.cause) from error
            raise
        if not isinstance(made, nn.Module):
            raise UserError(f"{self._place.name}.model() returns {type(made).__name__}, not a torch.nn.Module", _NEEDED["model"], "task")
        return made

    def initial(self, name: str, shape: tuple[int, ...]) -> Initial | None:
        if not hasattr(self._own, "initial"):
            return None
        with self._calling("initial"):
            found = self._own.initial(name, shape)
        if found is not None and not isinstance(found, Initial):
            raise UserError(f"{self._place.name}.initial({name}) returns {type(found).__name__}", "lockstep.Initial(std, mean), or None to keep the module's own values", "task")
        return found

    def loss(self, model: Any, batch: Arrays) -> Mean:
        found: Mean = self._own.loss(model, batch)
        if not self._checked:
            _check_loss(found, f"{self._place.name}.loss()")
            self._checked = torch.is_grad_enabled()
        return found

    def eval_names(self) -> tuple[str, ...]:
        return tuple(f"{name}.{part}" for name in ("loss", *self._metrics) for part in Mean._fields)

    def evaluate(self, model: Any, batch: Arrays) -> Mapping[str, Any]:
        found = {"loss": self.loss(model, batch), **self._measured(model, batch)}
        if found.keys() != {"loss", *self._metrics}:
            raise self._wrong_metrics(f"gives {', '.join(list(found)[1:])} for one batch and {', '.join(self._metrics)} for another", "the same names for every batch; a weight may be 0")
        return {f"{name}.{part}": value for name, mean in found.items() for part, value in zip(Mean._fields, mean, strict=True)}

    def summarize(self, sums: Mapping[str, float]) -> dict[str, float]:
        means = {name: Mean(sums[f"{name}.sum"], sums[f"{name}.weight"]) for name in ("loss", *self._metrics)}
        return {name: mean.sum / mean.weight if mean.weight else math.nan for name, mean in means.items()}

    def sample(self, model: Any, seed: int) -> list[str]:
        return []

    def assets(self) -> Mapping[str, Path]:
        return {}

    @cached_property
    def _metrics(self) -> tuple[str, ...]:
        """The metrics' names, learnt from one held-out row: on a model without values, or else on a real one. A rank without held-out rows of its own needs them too."""
        if not hasattr(self._own, "metrics") or self._held_out is None:
            return ()
        row = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in self._held_out[np.arange(1)].items()}
        with torch.no_grad():
            try:
                with torch.device("meta"):
                    return tuple(self._measured(self.model().eval(), {name: tensor.to("meta") for name, tensor in row.items()}))
            except Exception:  # it looks at values
                with torch.random.fork_rng(devices=[]), self._calling("metrics"):
                    return tuple(self._measured(self.model().eval(), row))

    def _measured(self, model: Any, batch: Arrays) -> Mapping[str, Mean]:
        found = self._own.metrics(model, batch) if hasattr(self._own, "metrics") else {}
        if not isinstance(found, Mapping):
            raise self._wrong_metrics(f"returns {type(found).__name__}", "a dict of name -> Mean(sum, weight)")
        for name, mean in found.items():
            if name in _TAKEN:
                raise self._wrong_metrics(f'gives "{name}", a name that is taken', "another name; the loss is measured in any case")
            if not isinstance(mean, Mean) or any(isinstance(part, torch.Tensor) and part.ndim for part in mean):
                raise self._wrong_metrics(f'gives no single Mean as "{name}"', "Mean(sum, weight), each a number or a tensor with one; both are added over all devices and divided once")
        return found

    def _wrong_metrics(self, cause: str, remedy: str) -> UserError:
        return UserError(f"{self._place.name}.metrics() {cause}", remedy, "task")

    def _calling(self, method: str) -> AbstractContextManager[None]:
        return calling(f"{self._place.name}.{method}()", self._place.path)

    def _outline(self) -> nn.Module:
        """The model without values, or with them where it can't be built so."""
        try:
            with torch.device("meta"), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of values that go nowhere
                return self.model()
        except RuntimeError:
            with torch.random.fork_rng(devices=[]):
                return self.model()


def _scalars(parameter: torch.Tensor) -> int:
    return parameter.numel() * (2 if parameter.is_complex() else 1)


def _instance(made: type, model: Mapping[str, Any], data: Mapping[str, Any]) -> Any:
    """Called with the fields that its __init__ asks for, by name where it names them."""
    takes = inspect.signature(made).parameters
    given = {"model": dict(model), "data": dict(data)}
    named = {name: fields for name, fields in given.items() if name in takes or any(p.kind is p.VAR_KEYWORD for p in takes.values())}
    if not takes or named:
        return made(**named)
    return made(*given.values())


def _check_methods(own: Any, name: str) -> None:
    """UserError: what is missing, all at once."""
    missing = [method for method in _NEEDED if not callable(getattr(own, method, None))]
    hidden = [method for method in (*_NEEDED, *_OPTIONAL) if method in getattr(own, "__dict__", {}) and callable(getattr(type(own), method, None)) and not callable(getattr(own, method))]
    if hidden:
        raise UserError(f"{name}.__init__ sets self.{hidden[0]}, which hides the method {hidden[0]}()", f"keep it under another name, such as self.{hidden[0]}_fields", "task")
    if missing:
        raise UserError(f"{name} has no {' and no '.join(f'{method}()' for method in missing)}", "".join(f"\n    {_NEEDED[method]}" for method in missing).removeprefix("\n    "), "task")
    mixing = getattr(own, "coupled", ())
    if not isinstance(mixing, tuple | list) or not all(isinstance(word, str) for word in mixing):
        raise UserError(f"{name}.coupled is {mixing!r}", 'a tuple of words for what mixes the samples of a batch: ("contrastive loss",)', "task")


def _check_loss(found: object, what: str) -> None:
    """UserError: it can't be added up and divided once."""
    if not isinstance(found, Mean):
        shape = f" of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else ""
        raise UserError(f"{what} returns {type(found).__name__}{shape}, not a lockstep.Mean", _MEAN, "task")
    if not isinstance(found.sum, torch.Tensor) or found.sum.ndim or not found.sum.is_floating_point():
        kind = f"a {found.sum.dtype} tensor of shape {tuple(found.sum.shape)}" if isinstance(found.sum, torch.Tensor) else f"of type {type(found.sum).__name__}"
        raise UserError(f"the sum of {what} is {kind}, not a tensor with one real number", _MEAN, "task")
    if torch.is_grad_enabled() and not found.sum.requires_grad:
        raise UserError(f"the sum of {what} has no gradient", "compute it from the model's output, without .item(), .detach(), float() or torch.no_grad() on the way", "task")
    if not isinstance(found.weight, int | float) and not (isinstance(found.weight, torch.Tensor) and not found.weight.ndim):
        kind = f"a tensor of shape {tuple(found.weight.shape)}" if isinstance(found.weight, torch.Tensor) else f"of type {type(found.weight).__name__}"
        raise UserError(f"the weight of {what} is {kind}, not one number", _MEAN, "task")


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """The global generators begin at the seed, so that every process draws the same, and are put back afterwards."""
    kept, kept_numpy, kept_torch = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(kept)
        np.random.set_state(kept_numpy)
        torch.random.set_rng_state(kept_torch)


def open_task(config: Config, cache: str) -> OwnTask:
    place = place_of(config.task)
    assert place is not None
    return OwnTask(place, config.model.model_extra or {}, config.data.model_extra or {}, config.train.seed)
