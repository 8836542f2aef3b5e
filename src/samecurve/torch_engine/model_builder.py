"""A task's model for each device of a process: its values by the rule of the task, or its own as
the first rank has them, its layers as the plan has them.
"""

import hashlib
import random
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from samecurve.core.determinism.init_values import values
from samecurve.errors import UserError
from samecurve.torch_engine.layers.batch_norm import synchronise_batch_norms
from samecurve.torch_engine.layers.dropout import key_dropout
from samecurve.torch_engine.model import (
    InitializeModule,
    apply_speed_options,
    cast_weights,
    freeze,
    parameters_on_meta,
    seeded,
)
from samecurve.torch_engine.on_meta import on_meta
from samecurve.torch_engine.setup import EngineSetup
from samecurve.torch_engine.training_mode import TrainingMode
from samecurve.torch_engine.user_model import compiled_in_place

if TYPE_CHECKING:
    from collections.abc import Sequence


class ModelBuilder:
    def __init__(self, setup: EngineSetup) -> None:
        self._setup, self._task = setup, setup.task
        self._seed = setup.plan.fixed.seed
        self.modes: list[TrainingMode] = []  # of the models that are built

    def build_all(self) -> list[nn.Module]:
        """One for each device of this process. UserError: the task has no such model."""
        models = [self._build(index) for index in range(len(self._setup.devices))]
        if len({id(model) for model in models}) < len(models):
            raise UserError(
                "model() gave the same object twice; each device needs one of its own",
                "build the module in model(), anew each time",
                "task",
            )
        return models

    def _build(self, device_index: int) -> nn.Module:
        """On the meta device if all its values follow from the seed, else with the values it gave
        itself.
        """
        setup, plan = self._setup, self._setup.plan
        model = self._build_on_meta()
        if model is None:
            model = self._build_with_values()
        self.modes.append(TrainingMode(model))
        model = cast_weights(model, plan.precision)
        freeze(model, setup.optimizer.rules)
        context = setup.contexts[device_index]
        if plan.norm_sync:
            synchronise_batch_norms(model, setup.strategy.peers()[device_index], context)
        if plan.keyed_dropout:
            key_dropout(model, context, self._seed)
        if compiled_in_place(model) and not plan.compile:
            from samecurve.torch_engine.compile import keep_uncompiled

            keep_uncompiled(model)
        apply_speed_options(model, plan, setup.devices[device_index])
        return model

    def _build_on_meta(self) -> nn.Module | None:
        """The model without its parameters' values, its buffers real, if the task gives a rule for
        every one of them.
        """
        try:
            with on_meta():
                model: nn.Module = self._task.model()
        except RuntimeError:
            return None  # it computes with values while it is built
        has_rules = all(
            parameter.is_meta and self._has_rule(name, parameter)
            for name, parameter in model.named_parameters()
        )
        if not has_rules:
            return None
        if any(True for _ in model.buffers()):
            if not self._initializes_modules:
                return None
            with seeded(self._seed), parameters_on_meta():
                model = self._task.model()
            self._setup.comm.broadcast(list(model.buffers()), self._setup.device)
        return model

    @property
    def _initializes_modules(self) -> bool:
        return self._task.init_module is not None

    def _has_rule(self, name: str, parameter: nn.Parameter) -> bool:
        shape = tuple(parameter.shape)
        return self._initializes_modules or self._task.initial(name, shape) is not None

    def initialize_module(self, model: nn.Module) -> InitializeModule | None:
        """What gives a module of this model its own first values by the task's rule; None: it has
        rules for single parameters.

        A module draws from (seed, its name), on a CPU: the same numbers on whatever devices.
        """
        rule = self._task.init_module
        if rule is None:
            return None

        def initialize(name: str, module: nn.Module) -> None:
            key = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
            with seeded(int.from_bytes(key[:7], "little")):
                rule(model, module)

        return initialize

    def _build_with_values(self) -> nn.Module:
        """Its own values, but where the task has a rule; the same on every rank."""
        with seeded(self._seed):
            random.seed(self._seed)
            np.random.seed(self._seed % (1 << 32))
            model: nn.Module = self._task.model()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if self._task.initial(name, tuple(parameter.shape)) is not None:
                    self.initialize(name, parameter)
        tensors: Sequence[torch.Tensor] = [p.detach() for p in model.parameters()]
        self._setup.comm.broadcast([*tensors, *model.buffers()], self._setup.device)
        return model

    def initialize(self, name: str, tensor: torch.Tensor) -> None:
        """Give a parameter the values that the task's rule has for its name.

        UserError: the rule is none.
        """
        shape = tuple(tensor.shape)
        initial = self._task.initial(name, shape)
        assert initial is not None
        if initial.std < 0:
            raise UserError(
                f"initial({name}) has standard deviation {initial.std}",
                "0 or more, or None to keep the model's own values",
                "task",
            )
        tensor.copy_(torch.from_numpy(values(self._seed, name, shape, initial)))
