"""A user's class with PyTorch."""

import inspect
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from samecurve.core.config.sections import Config
from samecurve.core.determinism.mean import Mean
from samecurve.core.planning.facts import UserOptimizerFacts
from samecurve.core.protocols import Arrays, StoredArrays
from samecurve.errors import RunError, UserError
from samecurve.tasks.user.adding import check_adds
from samecurve.tasks.user.fields import place_of
from samecurve.tasks.user.task import MEAN, UserTask
from samecurve.torch_engine.layers.batch_norm import MicroBatchContext as Keys
from samecurve.torch_engine.layers.batch_norm import coupling_layers
from samecurve.torch_engine.layers.dropout import key_dropout, unkeyed_dropout
from samecurve.torch_engine.model import (
    cast_weights,
    freeze,
    repeated_blocks,
    seeded,
    sharding_facts,
)
from samecurve.torch_engine.user_optimizer import NamedParams, try_optimizer
from samecurve.torch_engine.weights import describe_arrays, load_weights

# parameters at most of a model that is tried on two samples beforehand: a second or so
_TRIED = 50_000_000


class TorchUserTask(UserTask):
    needed: ClassVar[dict[str, str]] = {
        "model": "model(self) -> torch.nn.Module: the model, built anew",
        **UserTask.needed,
    }

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        if hasattr(self._own, "optimizer"):
            self.optimizer = self._bring

    def describe(self) -> Mapping[str, Any]:
        model = self._outline()
        if not any(p.requires_grad and p.numel() for p in model.parameters()):
            raise UserError(
                f"{self._place.name}.model() has no parameter to train",
                "nn.Parameters with requires_grad, in the module or its children",
                "task",
            )
        if tried := self._tried(sum(map(_scalars, model.parameters()))):
            check_adds(tried, f"{self._place.name}.loss()")
        named = dict(model.named_parameters())
        groups = self._optimizer.rules.describe(
            {name: _scalars(p) for name, p in named.items()},
            [name for name, p in named.items() if not p.requires_grad],
        )
        freeze(model, self._optimizer.rules)
        parts = [
            sum(map(_scalars, block.parameters())) for block in repeated_blocks(model) or [model]
        ]
        return {
            **groups,
            "user_optimizer": self._own_optimizer(model),
            "params": sum(map(_scalars, model.parameters())),
            "blocks": len(parts),
            "block_params": max(parts),
            "coupled": (*getattr(self._own, "coupled", ()), *coupling_layers(model)),
            **describe_arrays(model),
            **sharding_facts(model),
            "unkeyed_dropout": unkeyed_dropout(model),
            "keyed_dropout": key_dropout(
                model, Keys(), 0
            ),  # on this outline only, to learn their names
        }

    def model(self) -> nn.Module:
        """RuntimeError: on the meta device, the user's code looks at values."""
        asked = [
            name
            for name, parameter in inspect.signature(self._own.model).parameters.items()
            if name in {"rngs", "dtype"} and parameter.default is parameter.empty
        ]
        if asked:
            raise UserError(
                f"{self._place.name}.model() asks for {' and '.join(asked)}, as flax models do",
                "--engine jax, which gives it; or a model() without it, which returns a"
                " torch.nn.Module",
                "task",
            )
        try:
            with self._calling("model"):
                made = self._own.model()
        except UserError as error:
            if torch.get_default_device().type == "meta":
                raise RuntimeError(error.cause) from error
            raise
        if not isinstance(made, nn.Module):
            flax = any(kind.__module__.startswith("flax.") for kind in type(made).__mro__)
            raise UserError(
                f"{self._place.name}.model() returns {type(made).__name__}, not a torch.nn.Module",
                "--engine jax, which trains flax modules" if flax else self.needed["model"],
                "task",
            )
        return made

    def _bring(self, params: NamedParams, lr: float) -> torch.optim.Optimizer:
        """The class's own optimizer."""
        with self._calling("optimizer"):
            made = self._own.optimizer(params, **({"lr": lr} if self._takes_lr() else {}))
        if not isinstance(made, torch.optim.Optimizer):
            raise UserError(
                f"{self._place.name}.optimizer() returns {type(made).__name__}, not a"
                " torch.optim.Optimizer",
                "one optimizer over all of `params`, such as torch.optim.RAdam(params, lr=lr)",
                "task",
            )
        return made

    def _takes_lr(self) -> bool:
        return "lr" in inspect.signature(self._own.optimizer).parameters

    def _own_optimizer(self, model: nn.Module) -> UserOptimizerFacts | None:
        if not hasattr(self._own, "optimizer"):
            return None
        found = try_optimizer(self._bring, self._optimizer, model)
        return UserOptimizerFacts(
            name=found.name,
            by=f"{self._place.name}.optimizer()",
            elementwise=getattr(self._own, "elementwise", False),
            takes_lr=self._takes_lr(),
            scales=found.lr_scales,
            num_states=found.num_states,
        )

    def check_loss(self, found: object, what: str) -> None:
        _check_loss(found, what)
        self._checked = torch.is_grad_enabled()

    def loss(self, model: Any, batch: Arrays) -> Mean:
        with self._calling("loss", RunError if self._checked else UserError):
            return super().loss(model, batch)

    def _tried(self, params: int) -> list[Mean] | None:
        """The loss of two samples, and of each alone, on a CPU before anything is trained.

        None: it can't be had here, which proves nothing of the run; its first step will tell.
        """
        if params > _TRIED or len(self._train) < 2:
            return None
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(self._seed)
            model = self.model().eval()
            rows = {
                name: torch.from_numpy(np.ascontiguousarray(array))
                for name, array in self._train[np.arange(2)].items()
            }
            found = []
            for which in ([0, 1], [0], [1]):
                try:
                    loss = self._own.loss(
                        model, {name: tensor[which] for name, tensor in rows.items()}
                    )
                except Exception:  # a model for GPUs only, say
                    return None
                _check_loss(loss, f"{self._place.name}.loss()")
                found.append(Mean(*map(float, loss)))
        return found

    def names_measured(self, row: Mapping[str, NDArray[Any]]) -> tuple[str, ...]:
        """On a model without values, or else on a real one."""
        rows = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in row.items()}
        with torch.no_grad():
            try:
                with torch.device("meta"):
                    return tuple(
                        self.measured(
                            self.model().eval(),
                            {name: tensor.to("meta") for name, tensor in rows.items()},
                        )
                    )
            except Exception:  # it looks at values
                with torch.random.fork_rng(devices=[]), self._calling("metrics"):
                    return tuple(self.measured(self.model().eval(), rows))

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


def _check_loss(found: object, what: str) -> None:
    """UserError: it can't be added up and divided once."""
    if not isinstance(found, Mean):
        shape = f" of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else ""
        raise UserError(
            f"{what} returns {type(found).__name__}{shape}, not a samecurve.Mean", MEAN, "task"
        )
    if (
        not isinstance(found.sum, torch.Tensor)
        or found.sum.ndim
        or not found.sum.is_floating_point()
    ):
        kind = (
            f"a {found.sum.dtype} tensor of shape {tuple(found.sum.shape)}"
            if isinstance(found.sum, torch.Tensor)
            else f"of type {type(found.sum).__name__}"
        )
        raise UserError(
            f"the sum of {what} is {kind}, not a tensor with one real number", MEAN, "task"
        )
    if torch.is_grad_enabled() and not found.sum.requires_grad:
        raise UserError(
            f"the sum of {what} has no gradient",
            "compute it from the model's output, without .item(), .detach(), float() or"
            " torch.no_grad() on the way",
            "task",
        )
    if not isinstance(found.weight, int | float) and not (
        isinstance(found.weight, torch.Tensor) and not found.weight.ndim
    ):
        kind = (
            f"a tensor of shape {tuple(found.weight.shape)}"
            if isinstance(found.weight, torch.Tensor)
            else f"of type {type(found.weight).__name__}"
        )
        raise UserError(f"the weight of {what} is {kind}, not one number", MEAN, "task")


def open_task(config: Config, cache: str) -> TorchUserTask:
    place = place_of(config.task)
    assert place is not None
    return TorchUserTask(
        place,
        config.model.model_extra or {},
        config.data.model_extra or {},
        config.train.precision,
        config.train.seed,
        config.optimizer,
    )


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return model.state_dict()


def load_model(config: Config, cache: str, weights: StoredArrays) -> nn.Module:
    """The user's model with these weights.

    The values that it draws for itself first are let go of, and leave torch's generators as they
    were.
    """
    task = open_task(config, cache)
    with seeded(config.train.seed):
        return load_weights(cast_weights(task.model(), config.train.precision), weights)
