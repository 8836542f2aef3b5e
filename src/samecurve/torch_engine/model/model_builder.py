"""The model of a task, built for each device of a process, with its first values.

The first values follow the task's rule, from the seed; without a rule they are the model's own, as
the first rank drew them. The layers are changed as the plan says (number format, dropout, norms,
features).
"""

import hashlib
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from samecurve.core.protocols import Task
from samecurve.core.weights import values
from samecurve.errors import UserError
from samecurve.torch_engine.model import TrainingMode, compiled_in_place
from samecurve.torch_engine.model.model_setup import (
    InitializeModule,
    IsGiven,
    Materializer,
    cast_weights,
    freeze,
    one_thread,
    parameters_on_meta,
    seeded,
)
from samecurve.torch_engine.step import EngineSetup

Share = Callable[[Sequence[torch.Tensor]], object]  # gives all ranks the first rank's values

# Methods and functions of nn.init that give a tensor other values in place: nothing happens on
# meta, but torch imports its compiler to find that out, which takes half as long as all of torch.
_IN_PLACE = ("normal_", "log_normal_", "exponential_", "cauchy_", "geometric_", "erfinv_", "clamp_")


class FirstMemory(NamedTuple):
    """The memory of a weight as model() made it.

    name: of the weight; memory: a reference that does not keep it
    """

    name: str
    memory: StorageWeakRef

    @property
    def is_held(self) -> bool:
        """Whether the weight, a view of it or anything else holds the memory."""
        return not self.memory.expired()  # type: ignore[no-untyped-call]


def all_given(_name: str) -> bool:
    """Every parameter has values from elsewhere (see IsGiven)."""
    return True


class FirstValues:
    """The first values of one task's models."""

    def __init__(self, task: Task, seed: int, share: Share) -> None:
        self._task, self._seed, self._share = task, seed, share

    def build(self) -> nn.Module:
        """Build the model: on the meta device where all values follow from the seed, else with the
        values that the model gave itself.
        """
        model = self._build_on_meta()
        return self._build_with_values() if model is None else model

    def materializer(
        self,
        model: nn.Module,
        device: torch.device,
        is_given: IsGiven | None = None,
        on_host: Collection[str] = (),
    ) -> Materializer:
        """The object that makes real what build() left on the meta device.

        is_given: parameters that stay empty; None: none
        on_host: names of parameters that lie in host memory, whatever the device
        """
        if is_given is all_given:
            return Materializer(model, device, on_host=on_host)
        rule = self.initialize_module(model)
        initialize = self.initialize if rule is None else None
        return Materializer(model, device, initialize, rule, is_given, on_host=on_host)

    def _build_on_meta(self) -> nn.Module | None:
        """The model without its parameters' values, its buffers real, if the task gives a rule for
        every one of them.
        """
        try:
            with on_meta():
                model: nn.Module = self._task.model()
        except RuntimeError:
            return None  # the model computes with values while it is built
        for_modules, initial = self._task.init_module is not None, self._task.initial
        has_rules = all(
            parameter.is_meta and (for_modules or initial(name, tuple(parameter.shape)) is not None)
            for name, parameter in model.named_parameters()
        )
        if not has_rules:
            return None
        if any(True for _ in model.buffers()):
            if not for_modules:
                return None
            with _from_seed(self._seed), parameters_on_meta():
                model = self._task.model()
            self._share(list(model.buffers()))
        return model

    def initialize_module(self, model: nn.Module) -> InitializeModule | None:
        """The function that gives a module of this model its own first values by the task's rule;
        None: the task has rules for single parameters.

        A module draws from (seed, its name), on a CPU: the same numbers on whatever devices.
        """
        rule = self._task.init_module
        if rule is None:
            return None

        def initialize(name: str, module: nn.Module) -> None:
            key = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
            with _from_seed(int.from_bytes(key[:7], "little")):
                rule(model, module)

        return initialize

    def _build_with_values(self) -> nn.Module:
        """The model with its own values, or the task's rule where there is one; the same on every
        rank.
        """
        with _from_seed(self._seed):
            random.seed(self._seed)
            np.random.seed(self._seed % (1 << 32))
            model: nn.Module = self._task.model()
        if any(parameter.is_meta for parameter in model.parameters()):
            raise UserError(
                "model() gives an object that an earlier call of model() made",
                "build the module in model(), anew each time",
                "task",
            )
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if self._task.initial(name, tuple(parameter.shape)) is not None:
                    self.initialize(name, parameter)
        tensors: Sequence[torch.Tensor] = [p.detach() for p in model.parameters()]
        self._share([*tensors, *model.buffers()])
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


@contextmanager
def _from_seed(seed: int) -> Iterator[None]:
    """Draw from the seed, and compute in one thread, within the block.

    A model may compute while it is built (a forward pass that makes lazy layers, an orthogonal
    matrix).
    """
    with one_thread(), seeded(seed):
        yield


@contextmanager
def on_meta() -> Iterator[None]:
    """Let tensors that are made within have no values."""
    with torch.device("meta"), _WithoutValues():
        yield


class _WithoutValues(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        if func.__name__ in _IN_PLACE:
            tensor = args[0] if args else options["tensor"]  # as nn.init passes it on
            if tensor.is_meta:
                return tensor
        return func(*args, **options)


class ModelBuilder:
    """Builds a task's models.

    modes: of the models that are built
    first_memory: of their weights, as the task gave them
    """

    def __init__(self, setup: EngineSetup) -> None:
        self._setup, self._seed = setup, setup.plan.fixed.seed
        comm, device = setup.comm, setup.device
        self.first_values = FirstValues(
            setup.task, self._seed, lambda tensors: comm.broadcast(tensors, device)
        )
        self.modes: list[TrainingMode] = []
        self.first_memory: list[FirstMemory] = []
        self._built: list[nn.Module] = []  # as the task gave them

    def build_all(self) -> list[nn.Module]:
        """A model for each device of this process. UserError: the task has no such model."""
        models: list[nn.Module] = []
        for index in range(len(self._setup.devices)):
            built = self.first_values.build()
            if built not in self._built:
                self._built.append(built)
                self._note_memory(built)
                models.append(self._prepared(built, index))
            elif self._setup.has_several_devices:
                raise UserError(
                    "model() gave the same object twice; each device needs one of its own",
                    "build the module in model(), anew each time",
                    "task",
                )
        return models

    def _note_memory(self, model: nn.Module) -> None:
        for name, weight in model.named_parameters():
            if type(weight) is nn.Parameter:  # others may have no memory of their own
                memory = StorageWeakRef(weight.untyped_storage())  # type: ignore[no-untyped-call]
                self.first_memory.append(FirstMemory(name, memory))

    def build(self, device_index: int) -> nn.Module:
        """Build the model for one device: on the meta device where all values follow from the seed,
        else with the values that the model gave itself.
        """
        return self._prepared(self.first_values.build(), device_index)

    def _prepared(self, model: nn.Module, device_index: int) -> nn.Module:
        """The model with what the plan asks for."""
        setup, plan = self._setup, self._setup.plan
        self.modes.append(TrainingMode(model))
        model = cast_weights(model, plan.compute.precision)
        freeze(model, setup.optimizer.rules)
        if plan.compute.keyed_dropout:
            from samecurve.torch_engine.randomness.dropout_layers import key_dropout

            key_dropout(model, setup.contexts[device_index], self._seed)
        if compiled_in_place(model):
            self._keep_compiled(model)
        for hooks in setup.features.values():
            hooks.prepare(model, device_index)
        for hooks in setup.features.values():
            hooks.wrap_blocks(model)
        return model

    def _keep_compiled(self, model: nn.Module) -> None:
        """Leave the parts compiled that the model's author compiles, but for what can't be."""
        from samecurve.torch_engine.model.compiled_code import (
            compile_own_parts,
            keep_uncompiled,
        )

        setup = self._setup
        keep_uncompiled(model)
        if setup.plan.compute.deterministic:
            compile_own_parts(model, setup.compiler, num_threads=len(setup.devices))
