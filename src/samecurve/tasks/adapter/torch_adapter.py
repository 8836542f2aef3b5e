"""A task's class with PyTorch: an nn.Module, and a loss of a microbatch."""

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from os import getpid
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from samecurve.core.config.param_groups import names_by_phase
from samecurve.core.determinism.mean import Mean
from samecurve.core.planning.facts import DescribedArrays, UserOptimizerFacts
from samecurve.core.protocols import START, Arrays, Progress, Sample, StoredArrays
from samecurve.errors import RunError, UserError
from samecurve.tasks.adapter.class_checks import NEEDED
from samecurve.tasks.adapter.data_kinds import parameters_of
from samecurve.tasks.adapter.engine_adapter import EngineAdapter, spec_of
from samecurve.tasks.adapter.returned_tensors import check_features, check_loss, without_gradient
from samecurve.tasks.adapter.two_samples import try_features, try_loss
from samecurve.torch_engine.model.batch_norm import coupling_layers
from samecurve.torch_engine.model.frozen_base import check_same_base, model_digest
from samecurve.torch_engine.model.initial_values import FirstValues
from samecurve.torch_engine.model.meta_models import on_meta
from samecurve.torch_engine.model.model_setup import (
    cast_weights,
    freeze,
    repeated_blocks,
    seeded,
    sharding_facts,
)
from samecurve.torch_engine.model.model_weights import describe_arrays, load_weights
from samecurve.torch_engine.model.training_mode import TrainingMode, kept_in_eval
from samecurve.torch_engine.model.user_model import plain_model
from samecurve.torch_engine.optimizers.hidden_matrices import hidden_matrices
from samecurve.torch_engine.optimizers.user_optimizer import NamedParams, try_optimizer
from samecurve.torch_engine.optimizers.user_schedule import SchedulerFactors
from samecurve.torch_engine.randomness.dropout_layers import dropout_layers
from samecurve.torch_engine.randomness.sample_numbers import keyed_trial
from samecurve.torch_engine.step.precision import attention_of_any_length


class TorchAdapter(EngineAdapter):
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
    def after_step(self) -> Callable[[nn.Module, int], None] | None:
        """The class's own after_step(), called after each update; None: it has none."""
        return self._call_after_step if self.methods.after_step is not None else None

    def describe_model(self) -> Mapping[str, Any]:
        model = self._outline()
        if not any(p.requires_grad and p.numel() for p in model.parameters()):
            raise UserError(
                f"{self.name}.model() has no parameter to train",
                "nn.Parameters with requires_grad, in the module or its children",
                "task",
            )
        num_params = sum(map(_scalars, model.parameters()))
        feature_bytes = None
        if self.whole_batch:
            feature_bytes = try_features(self, num_params, self._config.train.seed)
        else:
            try_loss(self, num_params, self._config.train.seed)
        named = dict(model.named_parameters())
        groups = self._config.optimizer.rules.describe(
            {name: _scalars(p) for name, p in named.items()},
            [name for name, p in named.items() if not p.requires_grad],
        )
        mode = TrainingMode(model)
        freeze(model, self._config.optimizer.rules)
        blocks = repeated_blocks(model) or [model]
        block_params = [sum(map(_scalars, block.parameters())) for block in blocks]
        return {
            **groups,
            "phases": self._phase_facts(model),
            "user_optimizer": self._optimizer_facts(model),
            "after_step": f"{self.name}.after_step()" if self.after_step else "",
            "params": num_params,
            "blocks": len(blocks),
            "block_params": max(block_params),
            "packed": tuple(name for name, p in named.items() if _is_packed(p)),
            "block_packed": max(
                sum(p.numel() for p in block.parameters() if _is_packed(p)) for block in blocks
            ),
            "coupled": (*self.methods.coupled, *coupling_layers(model)),
            "kept_in_eval": kept_in_eval(model),
            "from_pretrained": mode.from_pretrained,
            **describe_arrays(model),
            **sharding_facts(model),
            "hidden_matrices": hidden_matrices(model),
            "feature_bytes": feature_bytes,
            "keyed_dropout": dropout_layers(model),
        }

    def model(self) -> nn.Module:
        """The class's model. RuntimeError: on the meta device, its code looks at values."""
        build = self.methods.model
        assert build is not None
        flax_arguments = [
            name
            for name, parameter in inspect.signature(build).parameters.items()
            if name in {"rngs", "dtype"} and parameter.default is parameter.empty
        ]
        if flax_arguments:
            raise UserError(
                f"{self.name}.model() asks for {' and '.join(flax_arguments)}, as flax models do",
                "--engine jax, which gives it; or a model() without it, which returns a"
                " torch.nn.Module",
                "task",
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
            return plain_model(model, f"{self.name}.model()")
        remedy = self.needed["model"]
        if any(kind.__module__.startswith("flax.") for kind in type(model).__mro__):
            remedy = "--engine jax, which trains flax modules"
        raise UserError(
            f"{self.name}.model() returns {type(model).__name__}, not a torch.nn.Module",
            remedy,
            "task",
        )

    def _build_optimizer(
        self, params: NamedParams, lr: float, phase: str = ""
    ) -> torch.optim.Optimizer:
        """The class's own optimizer over these parameters."""
        assert self.methods.optimizer is not None
        arguments = self.arguments_of("optimizer", phase=phase, lr=lr)
        with self.calling("optimizer"):
            optimizer = self.methods.optimizer(params, **arguments)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UserError(
                f"{self.name}.optimizer() returns {type(optimizer).__name__}, not a"
                " torch.optim.Optimizer",
                "one optimizer over all of `params`, such as torch.optim.RAdam(params, lr=lr)",
                "task",
            )
        if any("initial_lr" in group for group in optimizer.param_groups):
            raise UserError(
                f"{self.name}.optimizer() makes a scheduler, which no step would drive",
                "def schedule(self, optimizer): return LambdaLR(optimizer, ...), or"
                " def schedule(self, step): the factor of the learning rate at that step",
                "task",
            )
        return optimizer

    def task_factor(self, step: int) -> float:
        if not self._schedules_optimizer:
            return super().task_factor(step)
        return self._scheduler_factors(step)

    @cached_property
    def _scheduler_factors(self) -> SchedulerFactors:
        make = self.methods.schedule
        assert make is not None
        return SchedulerFactors(make, self._config.optimizer, f"{self.name}.schedule()")

    def _call_after_step(self, model: nn.Module, step: int) -> None:
        assert self.methods.after_step is not None
        with self.calling("after_step", RunError if step else UserError):
            self.methods.after_step(model, step)

    def _phase_facts(self, model: nn.Module) -> tuple[str, ...]:
        """Each phase in words. UserError: a parameter belongs to no phase, or to two."""
        if not self.phases:
            return ()
        sizes = {name: _scalars(p) for name, p in model.named_parameters() if p.requires_grad}
        by_phase = names_by_phase(list(sizes), self.phases)
        return tuple(
            f"{phase} ({sum(sizes[name] for name in names)} parameters)"
            for phase, names in by_phase.items()
        )

    def _optimizer_facts(self, model: nn.Module) -> UserOptimizerFacts | None:
        if self.methods.optimizer is None:
            return None
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        by_phase = {"": set(named)}
        if self.phases:
            by_phase = names_by_phase(list(named), self.phases)
        tried_ones = [
            try_optimizer(
                partial(self._build_optimizer, phase=phase),
                self._config.optimizer,
                {name: named[name] for name in named if name in names},
            )
            for phase, names in by_phase.items()
        ]
        states = [tried.num_states for tried in tried_ones if tried.num_states is not None]
        return UserOptimizerFacts(
            name=" and ".join(dict.fromkeys(tried.name for tried in tried_ones)),
            by=f"{self.name}.optimizer()",
            elementwise=self.methods.elementwise,
            takes_lr="lr" in parameters_of(self.methods.optimizer),
            scales=tuple(scale for tried in tried_ones for scale in tried.lr_scales),
            num_states=max(states) if len(states) == len(tried_ones) else None,
        )

    def losses(
        self, model: Any, batch: Arrays, progress: Progress = START, phase: str = ""
    ) -> Mapping[str, Mean]:
        """The loss of a microbatch, as "loss", and what is logged beside it, without its gradient.

        Every step goes through here. A class whose loss(self, model, batch) returns one Mean pays
        for nothing else: this calls the method itself, and checks what comes back.
        """
        loss, process = self._loss, getpid()
        try:
            if loss.asks:
                returned = loss.method(model, batch, **loss.named(progress, phase))
            else:
                returned = loss.method(model, batch)
        except BaseException as error:
            loss.raise_explained(error, process)
        if getpid() != process:
            loss.end_copy()
        if type(returned) is Mean and _is_plain(*returned):
            self._loss_worked = self._loss_worked or returned.sum.requires_grad
            return {"loss": returned}
        return self._named(returned, "loss")

    def _named(self, returned: Any, method: str) -> Mapping[str, Mean]:
        return without_gradient(super()._named(returned, method))

    def check_loss(self, loss: object, what: str) -> None:
        check_loss(loss, what)
        self._loss_worked = self._loss_worked or torch.is_grad_enabled()

    def check_features(self, features: object) -> None:
        check_features(features, f"{self.name}.features()")

    def metric_specs(self, row: Mapping[str, NDArray[Any]]) -> dict[str, Mean]:
        """The sums that metrics() gives, by a model without values, or else by a real one."""
        rows = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in row.items()}
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
        precision = self._config.train.precision
        with seeded(self._config.train.seed):
            return load_weights(cast_weights(self.model(), precision), weights)

    def load_on_base(self, weights: StoredArrays, seed: int, digest: bytes, path: str) -> nn.Module:
        first_values = FirstValues(self, seed, lambda _: None)
        model = cast_weights(first_values.build(), self._config.train.precision)
        freeze(model, self._config.optimizer.rules)
        first_values.materializer(model, torch.device("cpu"), weights.__contains__)(model)
        frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
        load_weights(model, weights, optional=frozen)
        check_same_base(model_digest(model), digest, path)
        return model

    def model_arrays(self) -> DescribedArrays:
        model = self._outline()
        freeze(model, self._config.optimizer.rules)
        frozen = tuple(name for name, p in model.named_parameters() if not p.requires_grad)
        return DescribedArrays(
            **describe_arrays(model), frozen=frozen, frozen_base=self.frozen_base
        )

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
        with attention_of_any_length():
            return super().respond(
                model, prompt, tokens=tokens, temperature=temperature, seed=seed, **options
            )

    def sample(self, model: Any, seed: int) -> Sequence[Sample]:
        with attention_of_any_length():
            return super().sample(model, seed)

    def place(self, model: nn.Module, device: str) -> nn.Module:
        return model.to(device)

    def named_tensors(self, model: nn.Module) -> dict[str, torch.Tensor]:
        return model.state_dict()

    def _outline(self) -> nn.Module:
        """The model without values, or with values where it can't be built without."""
        try:
            with on_meta(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of values that go nowhere
                return self.model()
        except RuntimeError:
            with torch.random.fork_rng(devices=[]):
                return self.model()


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


def _scalars(parameter: torch.Tensor) -> int:
    """How many numbers a parameter holds; 0 for a packed one, which is counted apart."""
    if _is_packed(parameter):
        return 0
    return parameter.numel() * (2 if parameter.is_complex() else 1)


def _is_packed(parameter: torch.Tensor) -> bool:
    """Whether a parameter holds a frozen array's values in codes of a byte (quantized)."""
    return parameter.dtype in {torch.uint8, torch.int8}
