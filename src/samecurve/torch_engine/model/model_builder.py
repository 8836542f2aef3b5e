"""The model of a task, built for each device of a process.

The first values follow the task's rule; without a rule they are the model's own, as the first rank
drew them. The layers are changed as the plan says (number format, dropout, norms, recompute).
"""

import torch
from torch import nn

from samecurve.core.planning.plan import Plan
from samecurve.errors import UserError
from samecurve.torch_engine.model.initial_values import FirstValues
from samecurve.torch_engine.model.model_setup import cast_weights, freeze, recompute
from samecurve.torch_engine.model.user_model import TrainingMode, compiled_in_place
from samecurve.torch_engine.step.setup import EngineSetup


class ModelBuilder:
    def __init__(self, setup: EngineSetup) -> None:
        self._setup, self._seed = setup, setup.plan.fixed.seed
        comm, device = setup.comm, setup.device
        self.first_values = FirstValues(
            setup.task, self._seed, lambda tensors: comm.broadcast(tensors, device)
        )
        self.modes: list[TrainingMode] = []  # of the models that are built

    def build_all(self) -> list[nn.Module]:
        """A model for each device of this process. UserError: the task has no such model."""
        models = [self.build(index) for index in range(len(self._setup.devices))]
        if len({id(model) for model in models}) < len(models):
            raise UserError(
                "model() gave the same object twice; each device needs one of its own",
                "build the module in model(), anew each time",
                "task",
            )
        return models

    def build(self, device_index: int) -> nn.Module:
        """Build the model for one device: on the meta device where all values follow from the seed,
        else with the values that the model gave itself.
        """
        setup, plan = self._setup, self._setup.plan
        model = self.first_values.build()
        self.modes.append(TrainingMode(model))
        model = cast_weights(model, plan.compute.precision)
        freeze(model, setup.optimizer.rules)
        context = setup.contexts[device_index]
        if plan.compute.norm_sync:
            from samecurve.torch_engine.model.batch_norm import synchronise_batch_norms

            synchronise_batch_norms(model, setup.strategy.peers()[device_index], context)
        if plan.compute.keyed_dropout:
            from samecurve.torch_engine.randomness.dropout_layers import key_dropout

            key_dropout(model, context, self._seed)
        if compiled_in_place(model) and not plan.compute.compile:
            from samecurve.torch_engine.model.compile_blocks import keep_uncompiled

            keep_uncompiled(model)
        _apply_speed_options(model, plan, setup.devices[device_index])
        return model


def _apply_speed_options(model: nn.Module, plan: Plan, device: torch.device) -> None:
    """Apply train.float8, train.recompute and train.compile, as the plan has them."""
    if plan.compute.float8:
        from samecurve.torch_engine.model.float8 import convert

        convert(model, device)
    if plan.compute.compile:
        from samecurve.torch_engine.model.compile_blocks import compile_model

        compile_model(model, plan.compute.recompute)
    else:
        recompute(model, plan.compute.recompute)
