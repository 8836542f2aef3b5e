"""A task's own optimizer: checked, driven by the schedule, left out of a step that is not finite,
its state saved by name.

What is saved is what it keeps for each parameter, as tensors of that one's shape or single numbers;
all else is refused at the first step.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from samecurve.core.config.sections import Optimizer
from samecurve.core.protocols import StoredArrays
from samecurve.errors import UserError
from samecurve.torch_engine.optimizers import OptimizerParam, OptimizerUpdate, local_view
from samecurve.torch_engine.users_code.side_effects import GeneratorStates
from samecurve.units import first_and_count

_SAVED = {torch.float64, torch.float32, torch.int64}
_MOST_TRIED_VALUES = 1 << 24  # with which an optimizer that looks at them is tried before a run
_SET_BY_US = {"params", "param_names", "lr"}  # of a parameter group
NamedParams = list[tuple[str, nn.Parameter]]
OptimizerFactory = Callable[[NamedParams, float], torch.optim.Optimizer]


class UserOptimizer(OptimizerUpdate):
    """make: (named parameters, the config's learning rate) -> the optimizer
    of_task: that optimizer

    UserError: it can't be driven, or was given other parameters.
    """

    def __init__(
        self, make: OptimizerFactory, fields: Optimizer, trained: Sequence[OptimizerParam]
    ) -> None:
        self._trained, self._num_steps = trained, 0
        self._left_out: Sequence[OptimizerParam] = ()
        self.of_task = make([(param.name, param.view) for param in trained], fields.lr)
        self.name = type(self.of_task).__name__
        self._check_step()
        self._check_params()
        self.lr_scales = [
            self._learning_rate(group) / fields.lr for group in self.of_task.param_groups
        ]

    def leave_out(self, params: Sequence[OptimizerParam]) -> None:
        """Leave these parameters and their state as they are from now on, and no others: they get
        no gradient, which torch's optimizers pass over.
        """
        self._left_out, self._num_steps = params, 0  # others will have a state of their own

    def step(self, lr: float, *, finite: torch.Tensor | bool) -> None:
        # bool waits for the device: nothing else is known to leave any such optimizer's state as it
        # was.
        if not bool(finite):
            return
        for group, scale in zip(self.of_task.param_groups, self.lr_scales, strict=True):
            group["lr"] = lr * scale
        for param in self._left_out:
            param.view.grad = None
        self._step()

    def _step(self) -> None:
        """Looked at are the steps 1, 2, 4, 8 and so on: an optimizer may do other things later.

        UserError: it does what could not be saved, or would differ by rank.
        """
        step: Any = self.of_task.step
        self._num_steps += 1
        if self._num_steps & (self._num_steps - 1):
            step()
            return
        device = self._trained[0].view.device
        settings, generators = self._group_settings(), GeneratorStates(device)
        step()
        self._check_state()
        changed = [
            key for key, value in self._group_settings().items() if settings.get(key) != value
        ]
        if changed:
            raise self._refused(
                f"changes {first_and_count(changed)} of its parameter groups as it goes, which no"
                " checkpoint holds",
                "an optimizer that keeps its course in its state, by parameter",
            )
        if generators.changed():
            raise self._refused(
                "draws random numbers, which each rank would draw for itself",
                "an optimizer that follows from the gradients alone; noise on the weights is for"
                " after_step(), where all ranks draw the same",
            )

    def state_of(self, param: OptimizerParam) -> Mapping[str, torch.Tensor]:
        return {
            name: _as_tensor(value)
            for name, value in self._state_of(param).items()
            if value is not None
        }

    def create_state(self) -> None:
        """Make the state exist by a step of zero gradients: what a torch optimizer keeps is known
        only after its first step.
        """
        for param in self._trained:
            param.view.grad = torch.zeros_like(param.view)
        for param in self._left_out:
            param.view.grad = None
        self._step()
        for param in self._trained:
            param.view.grad = None

    def after_restore(self, _saved: StoredArrays, filled: Mapping[str, torch.Tensor]) -> None:
        """Tensors are filled in place; single numbers are set here."""
        for param in self._trained:
            state = self._state_of(param)
            for name, value in state.items():
                if isinstance(value, int | float):
                    number = filled[f"optimizer/{name}/{param.name}"].item()
                    state[name] = type(value)(number)

    def _state_of(self, param: OptimizerParam) -> dict[str, Any]:
        state: dict[str, Any] = self.of_task.state.get(param.view, {})
        return state

    def _group_settings(self) -> dict[str, str]:
        groups = self.of_task.param_groups
        keys = dict.fromkeys(key for group in groups for key in group if key not in _SET_BY_US)
        return {key: repr([group.get(key) for group in groups]) for key in keys}

    def _learning_rate(self, group: Mapping[str, object]) -> float:
        rate = group.get("lr")
        if not isinstance(rate, int | float | torch.Tensor):
            raise self._refused(
                "has a parameter group without a learning rate, which the schedule could drive",
                "lr as a number in each group",
            )
        return float(rate)

    def _check_step(self) -> None:
        closure = inspect.signature(self.of_task.step).parameters.get("closure")
        if closure and closure.default is closure.empty:
            raise self._refused_for_closure()

    def check_closure(self) -> None:
        """UserError: a step has failed that does not fail with a closure."""
        try:
            self.of_task.step(lambda: 0.0)
        except Exception:  # the step without a closure says what is wrong
            return
        raise self._refused_for_closure()

    def _refused_for_closure(self) -> UserError:
        return self._refused(
            "wants a closure that computes the loss anew, as often as it likes: a step here has its"
            " loss once",
            "an optimizer whose step() needs nothing. SAM and LBFGS, which take a second gradient"
            " of the batch within a step, can't be trained here",
        )

    def _check_params(self) -> None:
        ids = {id(param) for group in self.of_task.param_groups for param in group["params"]}
        missing = [param.name for param in self._trained if id(param.view) not in ids]
        remedy = (
            "all of `params`, which are (name, parameter) pairs: under fsdp, and where weights are"
            " complex, they are not the model's own; freeze: true in optimizer.groups leaves"
            " some out"
        )
        if missing:
            raise self._refused(f"was not given {first_and_count(missing)}", remedy)
        if len(ids) > len(self._trained):
            raise self._refused(
                "was given more than `params` (parameters beside them:"
                f" {len(ids) - len(self._trained)})",
                remedy,
            )

    def _check_state(self) -> None:
        params = {id(param.view): param for param in self._trained}
        for key, state in self.of_task.state.items():
            param = params.get(id(key))
            if param is None:
                raise self._refused(
                    f"keeps state that belongs to no parameter ({str(key)[:40]})",
                    "state by parameter",
                )
            for name, value in state.items():
                if fault := _fault_of(name, value, param):
                    raise self._refused(
                        f"keeps {name!r} of {param.name} as {fault}, which can be neither shared"
                        " out nor saved by name",
                        "state that is a tensor of the parameter's shape (float32, float64, int64)"
                        " or one number",
                    )

    def _refused(self, cause: str, remedy: str) -> UserError:
        return UserError(f"optimizer() of the task: {self.name} {cause}", remedy, "task")


def _fault_of(name: object, value: object, param: OptimizerParam) -> str:
    """The fault of an entry of a parameter's state; empty: there is none."""
    if not isinstance(name, str) or "/" in name:
        return "an entry without a plain name"
    if value is None or isinstance(value, int | float):
        return ""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    if value.ndim and value.shape != param.view.shape:
        return f"a tensor of shape {tuple(value.shape)}, where it has {tuple(param.view.shape)}"
    return "" if value.dtype in _SAVED else f"{value.dtype}"


def _as_tensor(value: torch.Tensor | float) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)


@dataclass(frozen=True)
class TriedOptimizer:
    """The facts of a user's optimizer, tried with the parameters of a model."""

    name: str  # of its class
    lr_scales: tuple[float, ...]  # of the config's learning rate, by group
    # Arrays of a parameter's shape for each; None: not tried, since it looks at values, of which
    # there are many.
    num_states: int | None


def try_optimizer(
    make: OptimizerFactory, fields: Optimizer, named: Mapping[str, nn.Parameter]
) -> TriedOptimizer:
    """named: what it is to train, as an outline on the meta device.

    UserError: the optimizer is refused.
    """
    try:
        return _try_on("meta", make, fields, named)
    # It looks at values, or at where they lie; whatever is really wrong comes again.
    except Exception:
        return _try_on("cpu", make, fields, named)


def _try_on(
    device: str, make: OptimizerFactory, fields: Optimizer, named: Mapping[str, nn.Parameter]
) -> TriedOptimizer:
    trained = [
        OptimizerParam(
            name,
            parameter,
            nn.Parameter(torch.zeros_like(local_view(parameter.detach()), device=device)),
        )
        for name, parameter in named.items()
    ]
    optimizer = UserOptimizer(make, fields, trained)
    size = sum(param.view.numel() for param in trained)
    if device != "meta" and size > _MOST_TRIED_VALUES:
        return TriedOptimizer(optimizer.name, tuple(optimizer.lr_scales), None)
    try:
        optimizer.create_state()
    except UserError:
        raise
    except Exception as error:
        optimizer.check_closure()
        raise UserError(
            f"optimizer() of the task: {optimizer.name} fails in a first step with zero gradients:"
            f" {type(error).__name__}: {error}",
            "an optimizer that takes dense gradients of any value",
            "task",
        ) from error
    num_states = max(
        sum(
            tensor.shape == param.view.shape and bool(tensor.ndim)
            for tensor in optimizer.state_of(param).values()
        )
        for param in trained
    )
    return TriedOptimizer(optimizer.name, tuple(optimizer.lr_scales), num_states)
