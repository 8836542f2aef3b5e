"""A task's class with PyTorch: an nn.Module, and a loss of a microbatch."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from os import getpid
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from samecurve.core.determinism import NEGATIVE_WEIGHT_REMEDY, RETURN_MEAN, Mean
from samecurve.core.planning.facts import DescribedArrays
from samecurve.core.protocols import (
    START,
    Arrays,
    Progress,
    StoredArrays,
)
from samecurve.errors import RunError, UserError
from samecurve.tasks.adapter import TaskAdapter
from samecurve.tasks.adapter.opened_class import NEEDED
from samecurve.tasks.adapter.returned import FEATURES, spec_of
from samecurve.tasks.protocol import Method
from samecurve.tasks.user_class.user_errors import end_copy, raise_explained
from samecurve.torch_engine.model import plain_model
from samecurve.torch_engine.model.model_builder import FirstValues, on_meta
from samecurve.torch_engine.model.model_setup import cast_weights, freeze, name_blocks, seeded
from samecurve.torch_engine.precision import as_weights, attention_of_any_length
from samecurve.torch_engine.randomness.replaced_functions import keyed_trial

if TYPE_CHECKING:
    from samecurve.torch_engine.optimizers.user_optimizer import NamedParams

_BLOCKS = "a list of modules of the model that it calls, none of them inside another"


class TorchAdapter(TaskAdapter):
    engine = "torch"
    needed: ClassVar[Mapping[str, str]] = {
        **NEEDED,
        "model": "model(self) -> torch.nn.Module: the model, built anew",
    }

    @property
    def optimizer(self) -> Callable[..., torch.optim.Optimizer] | None:
        """The class's own optimizer, made from parameters, lr and phase; None: the config's."""
        return self._build_optimizer if self.methods.optimizer is not None else None

    @property
    def brings(self) -> Mapping[str, Any]:
        """The features that the class brings, with what their hooks take."""
        found: dict[str, Any] = {"phases": self.phases} if self.phases else {}
        if self.methods.after_step:
            found["after_step"] = self._call_after_step
        return found

    def describe_model(self) -> Mapping[str, Any]:
        from samecurve.tasks.adapter.torch_facts import describe_model

        return describe_model(self, self.config, self._build_optimizer)

    def model_arrays(self) -> DescribedArrays:
        from samecurve.tasks.adapter.torch_facts import model_arrays

        return model_arrays(self, self.config)

    def model(self) -> nn.Module:
        """The class's model. RuntimeError: on the meta device, its code looks at values."""
        build = self.methods.model
        flax_arguments = [
            name
            for name, parameter in inspect.signature(build).parameters.items()
            if name in {"rngs", "dtype"} and parameter.default is parameter.empty
        ]
        if flax_arguments:
            raise self.wrong(
                "model",
                f"asks for {' and '.join(flax_arguments)}, as flax models do",
                "--engine jax, which gives it; or a model() without it, which returns a"
                " torch.nn.Module",
            )
        try:
            with self.calling("model"):
                model = build()
        except UserError as error:
            if torch.get_default_device().type == "meta":
                raise RuntimeError(error.cause) from error
            raise _with_device_remedy(error.cause) or error from error.__cause__
        except ValueError as error:  # a rank's own word for a lost peer, so calling() leaves it
            raise _with_device_remedy(f"{self.name}.model(): {error}") or error from None
        if isinstance(model, nn.Module):
            plain = plain_model(model, f"{self.name}.model()")
            if self.methods.model_blocks is not None:
                self._name_blocks(plain, self.methods.model_blocks)
            return plain
        remedy = self.needed["model"]
        if any(kind.__module__.startswith("flax.") for kind in type(model).__mro__):
            remedy = "--engine jax, which trains flax modules"
        cause = f"returns {type(model).__name__}, not a torch.nn.Module"
        raise self.wrong("model", cause, remedy)

    def _name_blocks(self, model: nn.Module, method: Method) -> None:
        """Mark the blocks that the class names. UserError: they are no blocks of this model."""
        with self.calling("model_blocks"):
            blocks = list(method(model))
        inside = {id(module) for module in model.modules() if module is not model}
        if not all(isinstance(block, nn.Module) and id(block) in inside for block in blocks):
            raise self.wrong("model_blocks", "gives what is no module inside the model", _BLOCKS)
        chosen = {id(block) for block in blocks}
        for block in blocks:
            if any(id(part) in chosen for part in block.modules() if part is not block):
                kind = type(block).__name__
                raise self.wrong("model_blocks", f"gives a {kind} and a block inside it", _BLOCKS)
        name_blocks(blocks)

    def _build_optimizer(
        self, params: "NamedParams", lr: float, phase: str = ""
    ) -> torch.optim.Optimizer:
        """The class's own optimizer over these parameters."""
        arguments = self.arguments_of("optimizer", phase=phase, lr=lr)
        with self.calling("optimizer"):
            optimizer = self.methods.optimizer(params, **arguments)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise self.wrong(
                "optimizer",
                f"returns {type(optimizer).__name__}, not a torch.optim.Optimizer",
                "one optimizer over all of `params`, such as torch.optim.RAdam(params, lr=lr)",
            )
        if any("initial_lr" in group for group in optimizer.param_groups):
            raise self.wrong(
                "optimizer",
                "makes a scheduler, which no step would drive",
                "def schedule(self, optimizer): return LambdaLR(optimizer, ...), or"
                " def schedule(self, step): the factor of the learning rate at that step",
            )
        return optimizer

    def scheduler_factors(self, schedule: Method) -> Callable[[int], float]:
        from samecurve.torch_engine.optimizers.user_schedule import SchedulerFactors

        return SchedulerFactors(schedule, self.config.optimizer, f"{self.name}.schedule()")

    def _call_after_step(self, model: nn.Module, step: int) -> None:
        with self.calling("after_step", RunError if step else UserError):
            self.methods.after_step(model, step)

    def losses(
        self, model: Any, batch: Arrays, progress: Progress = START, phase: str = ""
    ) -> Mapping[str, Mean]:
        """The loss of a microbatch, as "loss", and what is logged beside it, without its gradient.

        Every step goes through here. A class whose loss(self, model, batch) returns one Mean pays
        for nothing else: this calls the method itself, and checks what comes back.
        """
        named = self.arguments_of("loss", progress, phase) if self.loss_asks else {}
        process = getpid()
        try:
            returned = self.methods.loss(model, batch, **named)
        except BaseException as error:
            kind = RunError if self._loss_worked else UserError
            raise_explained(error, f"{self.name}.loss()", self.file, kind, process)
        if getpid() != process and self.file is not None:
            end_copy(f"{self.name}.loss()")
        if type(returned) is Mean and _is_plain(*returned):
            self._loss_worked = self._loss_worked or returned.sum.requires_grad
            return {"loss": returned}
        return self.named_losses(returned, "loss")

    def named_losses(self, returned: Any, method: str) -> Mapping[str, Mean]:
        return _without_gradient(super().named_losses(returned, method))

    def check_loss(self, loss: object, what: str) -> None:
        _check_loss(loss, what)
        self._loss_worked = self._loss_worked or torch.is_grad_enabled()

    def check_features(self, features: object) -> None:
        if not isinstance(features, Mapping) or not features:
            raise self.wrong("features", f"returns {_kind_of(features)}", FEATURES)
        for name, feature in features.items():
            if not isinstance(feature, torch.Tensor) or not feature.ndim:
                raise self.wrong("features", f'gives "{name}" as {_kind_of(feature)}', FEATURES)

    def metric_specs(self, row: Mapping[str, NDArray[Any]]) -> dict[str, Mean]:
        """The sums that metrics() gives, by a model without values, or else by a real one."""
        rows = {  # for a model as model() makes it, before its weights are converted
            name: torch.from_numpy(np.ascontiguousarray(as_weights(array, "f32")))
            for name, array in row.items()
        }
        with torch.no_grad():
            try:
                with on_meta():
                    empty = {name: tensor.to("meta") for name, tensor in rows.items()}
                    metrics = self.measure(self.model().eval(), empty)
            except Exception:  # it looks at values
                count = len(next(iter(rows.values())))
                with torch.random.fork_rng(devices=[]), keyed_trial(count):
                    metrics = self.measure(self.model().eval(), rows)
        return {name: spec_of(mean) for name, mean in metrics.items()}

    def load(self, weights: StoredArrays) -> nn.Module:
        """The model with these weights, by a checkpoint's names, in eval mode.

        The values that the model first draws for itself are dropped, and torch's generators are
        left as they were.
        """
        from samecurve.torch_engine.model.model_weights import load_weights

        self._refuse_other_shapes(weights)
        precision = self.config.train.precision
        with seeded(self.config.train.seed):
            return load_weights(cast_weights(self.model(), precision), weights)

    def load_on_base(self, weights: StoredArrays, seed: int, digest: bytes, path: str) -> nn.Module:
        from samecurve.torch_engine.model.frozen_base import check_same_base, model_digest
        from samecurve.torch_engine.model.model_weights import load_weights

        self._refuse_other_shapes(weights)
        first_values = FirstValues(self, seed, lambda _: None)
        model = cast_weights(first_values.build(), self.config.train.precision)
        freeze(model, self.config.optimizer.rules)
        first_values.materializer(model, torch.device("cpu"), weights.__contains__)(model)
        frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
        load_weights(model, weights, optional=frozen)
        check_same_base(model_digest(model), digest, path)
        return model

    def _refuse_other_shapes(self, weights: StoredArrays) -> None:
        """Compare the model with weights before it takes memory: a run may come from anywhere.

        UserError: the weights are not this model's.
        """
        from samecurve.core.weights import check_weights
        from samecurve.tasks.adapter.torch_facts import model_arrays, without_values

        try:
            model = without_values(self)
        except RuntimeError:  # its code looks at values, which take memory
            return
        described = model_arrays(self, self.config, model)
        shapes = {name: weights.shape(name) for name in weights}
        optional = {*described.buffers, *(described.frozen if described.frozen_base else ())}
        check_weights(shapes, described.arrays, optional, "the checkpoint", "task")

    def generating(self) -> AbstractContextManager[object]:
        return attention_of_any_length()

    def place(self, model: nn.Module, device: str) -> nn.Module:
        return model.to(device)

    def named_tensors(self, model: nn.Module) -> dict[str, torch.Tensor]:
        return model.state_dict()


def _is_plain(total: Any, weight: Any) -> bool:
    """Whether a Mean is one that check_loss() would pass, by the quickest questions."""
    if type(total) is not torch.Tensor or total.ndim or not total.is_floating_point():
        return False
    if not total.requires_grad and torch.is_grad_enabled():
        return False
    if type(weight) is int or type(weight) is float:
        return weight >= 0
    return type(weight) is torch.Tensor and not weight.ndim


def _with_device_remedy(cause: str) -> UserError | None:
    """The error of a model() that goes to devices by itself; None: the cause is another one."""
    if not any(sign in cause for sign in ("process group", "CUDA enabled", "NVIDIA driver")):
        return None
    remedy = (
        "the bare module on no device, as nn.Module makes it: --devices and --strategy say where it"
        " goes"
    )
    return UserError(cause, remedy, "task")


def _check_loss(loss: object, what: str) -> None:
    """UserError: what a method returns as the loss can't be added up and divided once.

    what: the method, for errors
    """
    if not isinstance(loss, Mean):
        raise UserError(
            f"{what} returns {_kind_of(loss)}, not a samecurve.Mean", RETURN_MEAN, "task"
        )
    total, weight = loss
    if not isinstance(total, torch.Tensor) or total.ndim or not total.is_floating_point():
        kind = f"of type {type(total).__name__}"
        if isinstance(total, torch.Tensor):
            kind = f"a {total.dtype} tensor of shape {tuple(total.shape)}"
        raise UserError(
            f"the sum of {what} is {kind}, not a tensor with one real number", RETURN_MEAN, "task"
        )
    if torch.is_grad_enabled() and not total.requires_grad:
        raise UserError(
            f"the sum of {what} has no gradient",
            "compute it from the model's output, without .item(), .detach(), float() or"
            " torch.no_grad() on the way",
            "task",
        )
    is_one_number = isinstance(weight, int | float)
    kind = f"of type {type(weight).__name__}"
    if isinstance(weight, torch.Tensor):
        is_one_number = not weight.ndim
        kind = f"a tensor of shape {tuple(weight.shape)}"
    if not is_one_number:
        raise UserError(f"the weight of {what} is {kind}, not one number", RETURN_MEAN, "task")
    if not isinstance(weight, torch.Tensor) and weight < 0:
        raise UserError(f"the weight of {what} is {weight:g}", NEGATIVE_WEIGHT_REMEDY, "task")


def _kind_of(value: object) -> str:
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
    return f"{type(value).__name__}{shape}"


def _without_gradient(losses: Mapping[str, Mean]) -> Mapping[str, Mean]:
    """The means with those beside the loss taken off their graphs: they are only logged."""
    if len(losses) == 1:
        return losses
    return {
        name: mean
        if name == "loss"
        else Mean(*(part.detach() if isinstance(part, torch.Tensor) else part for part in mean))
        for name, mean in losses.items()
    }
