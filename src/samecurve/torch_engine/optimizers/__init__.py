"""The parameters that an optimizer is given, as it sees them: real numbers, this process's part of
them. The update of a step, and what of an optimizer's state a checkpoint holds; adamw and sgd.

The config's others: features/optimizers/. A task's own: user_optimizer.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from samecurve.core.config.sections import Optimizer
from samecurve.core.protocols import StoredArrays
from samecurve.torch_engine.model.model_setup import repeated_blocks


@dataclass
class OptimizerParam:
    """A trained parameter and the real, local values of it that the optimizer sees: the parameter
    itself, unless it is complex or sharded.
    """

    name: str
    parameter: nn.Parameter
    view: nn.Parameter

    def refresh(self) -> None:
        """Let the optimizer see this step's gradient (and the values, which a strategy may have
        moved).
        """
        if self.view is not self.parameter:
            self.view.data = local_view(self.parameter.detach())
            self.view.grad = (
                None if self.parameter.grad is None else local_view(self.parameter.grad)
            )


class HostCopyParam(OptimizerParam):
    """A parameter that lies whole on a GPU while the shards of others lie in host memory.
    Its view is a copy in host memory, since an optimizer moves parameters of one device.
    """

    def refresh(self) -> None:
        gradient = self.parameter.grad
        self.view.data.copy_(local_view(self.parameter.detach()))
        self.view.grad = None if gradient is None else local_view(gradient).to(self.view.device)

    def move_back(self) -> None:
        """Give the parameter the values that the optimizer has computed."""
        local_view(self.parameter.detach()).copy_(self.view.detach())


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a ShardedParameter (model/), of which this process has some rows."""
    return _own_rows(tensor) is not None


def _own_rows(tensor: torch.Tensor) -> torch.Tensor | None:
    """This process's rows of a ShardedParameter, whose class few runs import; None: it is none."""
    return getattr(tensor, "own_rows", None)


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor, which may be sharded; no copy."""
    rows = _own_rows(tensor)
    return tensor if rows is None else rows.detach()


def local_view(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor, complex values as pairs of real ones; no copy."""
    part = own_part(tensor)
    return torch.view_as_real(part) if part.is_complex() else part


def optimizer_params(model: nn.Module) -> list[OptimizerParam]:
    """The parameters of a model that are trained, as an optimizer sees them."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    places = {own_part(parameter).device for parameter in trained.values()}
    params = []
    for name, parameter in trained.items():
        view, kind = parameter, OptimizerParam
        if len(places) > 1 and own_part(parameter).device.type != "cpu":
            view, kind = nn.Parameter(local_view(parameter.detach()).cpu()), HostCopyParam
        elif is_sharded(parameter) or parameter.is_complex():
            view = nn.Parameter(local_view(parameter.detach()))
        params.append(kind(name, parameter, view))
    return params


def hidden_matrices(model: nn.Module) -> tuple[str, ...]:
    """Names of matrices, and of stacks of them (a mixture's experts), within the repeated blocks;
    of a model without such blocks, of all its layers.

    None is a weight of an embedding or a kernel of a convolution, and neither are the model's first
    and last arrays, its input and output, unless they lie in a block of several layers.
    """
    blocks = repeated_blocks(model)
    in_blocks = {id(p) for block in blocks for p in block.parameters()}
    bare = {id(p) for block in blocks if not list(block.children()) for p in block.parameters()}
    others = {
        id(p)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag | _ConvNd)
        for p in module.parameters(recurse=False)
    }
    arrays = [(name, p) for name, p in model.named_parameters() if p.ndim > 1]
    for _, p in arrays[:1] + arrays[-1:]:
        if id(p) not in in_blocks or id(p) in bare:
            others.add(id(p))
    matrices = [(name, p) for name, p in arrays if id(p) not in others and _is_matrix(p)]
    hidden = [name for name, p in matrices if id(p) in in_blocks]
    if not hidden:
        hidden = [name for name, p in matrices if p.ndim == 2]
    return tuple(hidden)


def _is_matrix(parameter: nn.Parameter) -> bool:
    """Whether it is one, or a stack of several."""
    is_stack = parameter.ndim == 3 and min(parameter.shape) > 1
    return (parameter.ndim == 2 or is_stack) and not parameter.is_complex()


_STATE_NAMES = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


class OptimizerUpdate(ABC):
    """An optimizer as a training step and a checkpoint use it. The base keeps nothing."""

    @abstractmethod
    def step(self, lr: float, *, finite: torch.Tensor | bool) -> None:
        """Make one update from the gradients of the parameters' views, which all have one; none
        where `finite` is False.

        A tensor is on the device that clips, and nobody waits for it.
        """

    @abstractmethod
    def state_of(self, param: OptimizerParam) -> Mapping[str, torch.Tensor]:
        """The state of one parameter, by name: single numbers, or tensors that lie along the first
        dimension as `param.view` does.
        """

    def whole_states(self, _param: OptimizerParam) -> Collection[str]:
        """Names of those that do not: each process has all of them, whatever its part of the
        parameter.
        """
        return ()

    def shared_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The state that the optimizer holds once for all parameters, by a checkpoint's name."""
        return iter(())

    def create_state(self) -> None:  # noqa: B027 - for most it exists from the start
        """Make all state exist, so that a checkpoint can fill it.

        What it, and the weights, hold afterwards is of no meaning.
        """

    def after_restore(  # noqa: B027 - most have nothing more to do
        self, saved: StoredArrays, filled: Mapping[str, torch.Tensor]
    ) -> None:
        """After state_of() was filled from a checkpoint. filled: by the checkpoint's names."""


class JoinedOptimizers(OptimizerUpdate):
    """Several optimizers, each of parameters of its own."""

    @abstractmethod
    def each(self) -> Iterable[OptimizerUpdate]:
        """The optimizers that move parameters."""

    @abstractmethod
    def optimizer_of(self, param: OptimizerParam) -> OptimizerUpdate:
        """The optimizer that has this parameter."""

    def step(self, lr: float, *, finite: torch.Tensor | bool) -> None:
        for optimizer in self.each():
            optimizer.step(lr, finite=finite)

    def state_of(self, param: OptimizerParam) -> Mapping[str, torch.Tensor]:
        return self.optimizer_of(param).state_of(param)

    def whole_states(self, param: OptimizerParam) -> Collection[str]:
        return self.optimizer_of(param).whole_states(param)

    def shared_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        for optimizer in self.each():
            yield from optimizer.shared_state()

    def create_state(self) -> None:
        for optimizer in self.each():
            optimizer.create_state()

    def after_restore(self, saved: StoredArrays, filled: Mapping[str, torch.Tensor]) -> None:
        for optimizer in self.each():
            optimizer.after_restore(saved, filled)


class ConfigOptimizer(OptimizerUpdate):
    """The base of the config's optimizers. It counts the updates, on the device.

    is_counted: whether the formula needs the count, so that a checkpoint has it
    """

    is_counted = True

    def __init__(
        self, fields: Optimizer, trained: Sequence[OptimizerParam], phase: str = ""
    ) -> None:
        """phase: of a step, where there are several"""
        self._fields = fields
        self._count = f"optimizer/step/{phase}" if phase else "optimizer/step"
        self._device = trained[0].view.device
        self._num_updates = torch.zeros((), dtype=torch.float32, device=self._device)

    @staticmethod
    def chosen(
        _fields: Optimizer, trained: Sequence[OptimizerParam], _hidden: Collection[str]
    ) -> Sequence[OptimizerParam]:
        """The parameters that this optimizer is for; adamw has the others.

        hidden: names of the matrices of hidden layers
        """
        return trained

    def shared_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.is_counted:
            yield self._count, self._num_updates

    def after_restore(self, saved: StoredArrays, _filled: Mapping[str, torch.Tensor]) -> None:
        if self.is_counted:
            self._num_updates.fill_(float(saved[self._count]))


@dataclass(frozen=True, kw_only=True)
class Member:
    """A parameter and its part in the config."""

    param: OptimizerParam
    lr_scale: float
    weight_decay: float

    @property
    def gradient(self) -> torch.Tensor:
        gradient = self.param.view.grad
        assert gradient is not None  # a step gives all a gradient, zeros where there is none
        return gradient


@dataclass(frozen=True)
class Group:
    """Parameters of one learning rate (times the schedule's), decay and number format."""

    lr_scale: float
    weight_decay: float
    views: list[torch.Tensor]  # what the optimizer moves
    states: list[list[torch.Tensor]]  # for each name of state, by parameter
    num_updates: list[torch.Tensor]  # by parameter: the one count, as adamw's kernel wants it


# updates a group from its gradients, with this learning rate; the last argument, a number on the
# device, is 1 where the step is left out
Kernel = Callable[["Group", list[torch.Tensor], float, torch.Tensor | None], None]


class BuiltInOptimizer(ConfigOptimizer):
    """adamw or sgd by torch's fused kernels, which leave a step out on the device itself; their
    state exists from the start.

    Called without torch.optim: its optimizers import torch._dynamo (2 s of every rank's start), and
    spend more of a small step than their kernels do.
    """

    def __init__(
        self, fields: Optimizer, trained: Sequence[OptimizerParam], phase: str = ""
    ) -> None:
        super().__init__(fields, trained, phase)
        self.is_counted = fields.name == "adamw"
        self._no_grad = torch.no_grad()
        names = _STATE_NAMES[fields.name]
        self._state = {
            id(param): {name: torch.zeros_like(param.view, requires_grad=False) for name in names}
            for param in trained
        }
        used = names if fields.name == "adamw" or fields.momentum else ()
        self._groups = [
            Group(
                lr_scale,
                weight_decay,
                [param.view for param in params],
                [[self._state[id(param)][name] for param in params] for name in used],
                [self._num_updates] * len(params),
            )
            for (lr_scale, weight_decay), params in grouped(fields, trained)
        ]

    def step(self, lr: float, *, finite: torch.Tensor | bool) -> None:
        if finite is False:
            return
        with self._no_grad:
            left_out = None
            if isinstance(finite, torch.Tensor):
                left_out = (~finite).float().to(self._device)
                self._num_updates.add_(1 - left_out)
            else:
                self._num_updates.add_(1)
            update = self._kernel()
            for group in self._groups:
                gradients: list[Any] = [view.grad for view in group.views]  # all have one
                update(group, gradients, lr * group.lr_scale, left_out)

    def _kernel(self) -> Kernel:
        return self._adamw if self.is_counted else self._sgd

    def _adamw(
        self,
        group: Group,
        gradients: list[torch.Tensor],
        lr: float,
        left_out: torch.Tensor | None,
    ) -> None:
        first_moments, second_moments = group.states
        beta1, beta2 = self._fields.betas
        torch._fused_adamw_(
            group.views,
            grads=gradients,
            exp_avgs=first_moments,
            exp_avg_sqs=second_moments,
            max_exp_avg_sqs=[],
            state_steps=group.num_updates,
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=group.weight_decay,
            eps=self._fields.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=None,
            found_inf=left_out,
        )

    def _sgd(
        self,
        group: Group,
        gradients: list[torch.Tensor],
        lr: float,
        left_out: torch.Tensor | None,
    ) -> None:
        torch._fused_sgd_(
            group.views,
            gradients,
            group.states[0] if group.states else [],
            weight_decay=group.weight_decay,
            momentum=self._fields.momentum,
            lr=lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
            grad_scale=None,
            found_inf=left_out,
        )

    def state_of(self, param: OptimizerParam) -> Mapping[str, torch.Tensor]:
        return self._state[id(param)]


def grouped(
    fields: Optimizer, trained: Sequence[OptimizerParam]
) -> list[tuple[tuple[float, float], list[OptimizerParam]]]:
    """Parameters by (lr_scale, weight decay), those of unlike number formats apart.

    Decay reaches matrices only, where no group of the config says otherwise.
    """
    groups: dict[tuple[float, float, torch.dtype], list[OptimizerParam]] = {}
    for param in trained:
        rule = fields.rules.rule_for(param.name, matrix=param.parameter.ndim >= 2)
        key = (rule.lr_scale, rule.weight_decay, param.view.dtype)
        groups.setdefault(key, []).append(param)
    return [((scale, decay), params) for (scale, decay, _), params in groups.items()]
