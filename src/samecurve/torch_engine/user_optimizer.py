"""A task's own optimizer: checked, driven by the schedule, left out of a step that is not finite,
its state saved by name.

What is saved is what it keeps for each parameter, as tensors of that one's shape or single numbers;
all else is refused at the first step.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from samecurve.core.config.sections import Optimizer
from samecurve.core.protocols import StoredArrays, Task
from samecurve.errors import UserError
from samecurve.torch_engine.optimizer import BuiltInOptimizer, OptimizerUpdate
from samecurve.torch_engine.optimizer_params import OptimizerParam, local_view
from samecurve.units import first_and_count

_SAVED = {torch.float64, torch.float32, torch.int64}
_FEW = 1 << 24  # scalars with which an optimizer that looks at values is tried before a run
_NAMED = {"params", "param_names", "lr"}  # of a parameter group: not what the optimizer learns
NamedParams = list[tuple[str, nn.Parameter]]
OptimizerFactory = Callable[[NamedParams, float], torch.optim.Optimizer]


def make_optimizer_update(
    task: Task, fields: Optimizer, trained: Sequence[OptimizerParam]
) -> OptimizerUpdate:
    """Of the config, unless the task brings one."""
    bring: OptimizerFactory | None = getattr(task, "optimizer", None)
    return UserOptimizer(bring, fields, trained) if bring else BuiltInOptimizer(fields, trained)


class UserOptimizer:
    """bring: (named parameters, the config's learning rate) -> the optimizer.

    UserError: it can't be driven, or was given other parameters.
    """

    def __init__(
        self, bring: OptimizerFactory, fields: Optimizer, trained: Sequence[OptimizerParam]
    ) -> None:
        self._trained, self._checked = trained, False
        self._optimizer = bring([(weight.name, weight.view) for weight in trained], fields.lr)
        self.name = type(self._optimizer).__name__
        self._check_given()
        self.lr_scales = [self._rate(group) / fields.lr for group in self._optimizer.param_groups]

    def step(self, lr: float, finite: torch.Tensor | bool) -> None:
        if not bool(
            finite
            # waits for the device: nothing else is known to leave every such optimizer's state as it
            # was
        ):
            return
        for group, scale in zip(self._optimizer.param_groups, self.lr_scales, strict=True):
            group["lr"] = lr * scale
        self._run()

    def _run(self) -> None:
        step: Any = self._optimizer.step
        if self._checked:
            step()
            return
        before, drawn = self._settings(), self._drawn()
        step()
        self._check_state()
        changed = [key for key, value in self._settings().items() if before.get(key) != value]
        if changed:
            raise self._refused(
                f"changes {first_and_count(changed)} of its parameter groups as it goes, which no checkpoint"
                " holds",
                "an optimizer that keeps its course in its state, by parameter",
            )
        if self._drawn() != drawn:
            raise self._refused(
                "draws random numbers, which each rank would draw for itself",
                "an optimizer that follows from the gradients alone",
            )
        self._checked = True

    def state_of(self, weight: OptimizerParam) -> Mapping[str, torch.Tensor]:
        return {
            slot: _tensor(value) for slot, value in self._state(weight).items() if value is not None
        }

    def shared_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(())

    def create_state(self) -> None:
        """By a step of zero gradients: what a torch optimizer keeps is known after its first step
        only.
        """
        for weight in self._trained:
            weight.view.grad = torch.zeros_like(weight.view)
        self._run()
        for weight in self._trained:
            weight.view.grad = None

    def after_restore(self, saved: StoredArrays, filled: Mapping[str, torch.Tensor]) -> None:
        for weight in self._trained:
            state = self._state(weight)
            for slot, value in state.items():
                if isinstance(value, int | float):
                    state[slot] = type(value)(filled[f"optimizer/{slot}/{weight.name}"].item())

    def _state(self, weight: OptimizerParam) -> dict[str, Any]:
        found: dict[str, Any] = self._optimizer.state.get(weight.view, {})
        return found

    def _settings(self) -> dict[str, str]:
        return {
            key: repr([group.get(key) for group in self._optimizer.param_groups])
            for group in self._optimizer.param_groups
            for key in group
            if key not in _NAMED
        }

    def _drawn(self) -> list[bytes]:
        """What changes with every random number of torch's."""
        device = self._trained[0].view.device
        return [
            state.numpy().tobytes()
            for state in (
                torch.get_rng_state(),
                *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else []),
            )
        ]

    def _rate(self, group: Mapping[str, Any]) -> float:
        rate = group.get("lr")
        if not isinstance(rate, int | float | torch.Tensor):
            raise self._refused(
                "has a parameter group without a learning rate, which the schedule could drive",
                "lr as a number in each group",
            )
        return float(rate)

    def _check_given(self) -> None:
        closure = inspect.signature(self._optimizer.step).parameters.get("closure")
        if closure and closure.default is closure.empty:
            raise self._refused(
                "wants a closure that computes the loss anew, as often as it likes: a step here has"
                " its loss once",
                "an optimizer whose step() needs nothing",
            )
        given = {
            id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]
        }
        missing = [weight.name for weight in self._trained if id(weight.view) not in given]
        remedy = (
            "all of `params`, which are (name, parameter) pairs: under fsdp, and where weights are"
            " complex, they are not the model's own; freeze: true in optimizer.groups leaves"
            " some out"
        )
        if missing:
            raise self._refused(f"was not given {first_and_count(missing)}", remedy)
        if len(given) > len(self._trained):
            raise self._refused(
                "was given more than `params` (parameters beside them:"
                f" {len(given) - len(self._trained)})",
                remedy,
            )

    def _check_state(self) -> None:
        known = {id(weight.view): weight for weight in self._trained}
        for key, slots in self._optimizer.state.items():
            weight = known.get(id(key))
            if weight is None:
                raise self._refused(
                    f"keeps state that belongs to no parameter ({str(key)[:40]})",
                    "state by parameter",
                )
            for slot, value in slots.items():
                if what := _odd(slot, value, weight):
                    remedy = (
                        "state that is a tensor of the parameter's shape (float32, float64, int64)"
                        " or one number"
                    )
                    raise self._refused(
                        f"keeps {slot!r} of {weight.name} as {what}, which can be neither shared"
                        " out nor saved by name",
                        remedy,
                    )

    def _refused(self, cause: str, remedy: str) -> UserError:
        return UserError(f"optimizer() of the task: {self.name} {cause}", remedy, "task")


def _odd(slot: object, value: Any, weight: OptimizerParam) -> str:
    """What is wrong with it; empty: nothing."""
    if not isinstance(slot, str) or "/" in slot:
        return "an entry without a plain name"
    if value is None or isinstance(value, int | float):
        return ""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    if value.ndim and value.shape != weight.view.shape:
        return f"a tensor of shape {tuple(value.shape)}, where it has {tuple(weight.view.shape)}"
    return "" if value.dtype in _SAVED else f"{value.dtype}"


def _tensor(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)


@dataclass(frozen=True)
class TriedOptimizer:
    """name: of its class.

    scales: of the config's learning rate, by group. slots: arrays of a parameter's shape for each;
    None: not tried, since it looks at values and there are many.
    """

    name: str
    lr_scales: tuple[float, ...]
    num_states: int | None


def try_optimizer(bring: OptimizerFactory, fields: Optimizer, model: nn.Module) -> TriedOptimizer:
    """What an optimizer does with the parameters of an outline. UserError: it is refused."""
    try:
        return _tried(bring, fields, model, "meta")
    except (
        Exception
    ):  # it looks at values, or at where they lie; whatever is really wrong comes again
        return _tried(bring, fields, model, "cpu")


def _tried(
    bring: OptimizerFactory, fields: Optimizer, model: nn.Module, device: str
) -> TriedOptimizer:
    trained = [
        OptimizerParam(
            name,
            parameter,
            nn.Parameter(torch.zeros_like(local_view(parameter.detach()), device=device)),
        )
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    made = UserOptimizer(bring, fields, trained)
    if device != "meta" and sum(weight.view.numel() for weight in trained) > _FEW:
        return TriedOptimizer(made.name, tuple(made.lr_scales), None)
    try:
        made.create_state()
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"optimizer() of the task: {made.name} fails in a first step with zero gradients:"
            f" {type(error).__name__}: {error}",
            "an optimizer that takes dense gradients of any value",
            "task",
        ) from error
    slots = max(
        sum(
            tensor.shape == weight.view.shape and bool(tensor.ndim)
            for tensor in made.state_of(weight).values()
        )
        for weight in trained
    )
    return TriedOptimizer(made.name, tuple(made.lr_scales), slots)
