"""The groups of weights that FSDP2 gathers together. torch makes none of this public."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

P = ParamSpec("P")
T = TypeVar("T")

# through them a checkpoint that keeps some results sees a block's operations
_NUMBERING = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)


def states_of(module: nn.Module) -> list[Any]:
    """The state that fully_shard() gave a module."""
    state: Any = getattr(module, "_get_fsdp_state", None)
    return [] if state is None else [state()]


def groups_of(module: nn.Module) -> list[Any]:
    """The groups of weights that fully_shard() made of a module; torch before 2.13 made one."""
    groups: list[Any] = []
    for state in states_of(module):
        several = getattr(state, "_fsdp_param_groups", None)
        groups += [state._fsdp_param_group] if several is None else several  # noqa: SLF001
    return [group for group in groups if group is not None]


def all_groups(root: nn.Module) -> list[Any]:
    """The groups of all modules; several modules may share one."""
    groups = {id(group): group for module in root.modules() for group in groups_of(module)}
    return list(groups.values())


def whole_weights(group: Any) -> list[nn.Parameter]:
    """The tensors that a group's weights are gathered into, once they have been."""
    made = (getattr(param, "_unsharded_param", None) for param in group.fsdp_params)
    return [parameter for parameter in made if parameter is not None]


def due_for_sum(group: Any) -> list[Any]:
    """The weights of a group that have a gradient, which post_backward() would sum."""
    return [
        param
        for param in group.fsdp_params
        if hasattr(param, "_unsharded_param")
        and (param.unsharded_accumulated_grad is not None or param.unsharded_param.grad is not None)
    ]


def uncounted(function: Callable[P, T]) -> Callable[P, T]:
    """The function, whose operations are not counted among those of a block.

    A checkpoint that keeps some results numbers a block's operations, to find them again in
    backward. Weights of modules in the block are gathered at other times then.
    """

    @wraps(function)
    def without_numbers(*arguments: P.args, **keywords: P.kwargs) -> T:
        if not isinstance(_get_current_dispatch_mode(), _NUMBERING):
            return function(*arguments, **keywords)
        with _pop_mode_temporarily():
            return without_numbers(*arguments, **keywords)

    return without_numbers


def is_idle(group: Any) -> bool:
    return bool(group._training_state == TrainingState.IDLE)  # noqa: SLF001


def gather_for_backward(group: Any) -> None:
    with group.use_training_state(TrainingState.PRE_BACKWARD):
        group.unshard()
        group.wait_for_unshard()


@contextmanager
def gathered_at_once(root: nn.Module, groups: Sequence[Any]) -> Iterator[None]:
    """All groups of a sharded model are gathered, and its hooks leave forward and backward passes
    as they are. Gradients stay whole, in the gathered weights.
    """
    reshard(groups)
    states = [state for module in root.modules() for state in states_of(module)]
    for state in states_of(root):
        state._lazy_init()  # noqa: SLF001 - for all states in it, as a first pass would
    for group in groups:
        with keep_frozen(group):
            gather_for_backward(group)
    for state in states:
        # in which FSDP2's hooks take a forward pass for one that backward makes again
        state._training_state = TrainingState.PRE_BACKWARD  # noqa: SLF001
    try:
        yield
    finally:
        for state in states:
            state._training_state = TrainingState.IDLE  # noqa: SLF001
        reshard(groups)


def reshard(groups: Sequence[Any]) -> None:
    """Free the gathered weights, and forget the order by which backward gathers ahead."""
    for group in groups:
        group.reshard()
        group._post_forward_indices.clear()  # noqa: SLF001
        getattr(group.comm_ctx, "post_forward_order", []).clear()  # made in a first pass


def begin_anew(states: Sequence[Any], groups: Sequence[Any]) -> None:
    """Forget that a backward pass has begun."""
    for state in states:
        state._state_ctx.post_backward_final_callback_queued = False  # noqa: SLF001
    for one in (*states, *groups):
        if one._training_state == TrainingState.PRE_BACKWARD:  # noqa: SLF001
            one._training_state = TrainingState.IDLE  # noqa: SLF001


def forget_pass(root: nn.Module, states: Sequence[Any], groups: Sequence[Any]) -> None:
    """Cut all weights again, and forget a pass that an error may have ended halfway."""
    forget: Callable[[], None] | None = getattr(root, "reset_iter_state", None)
    if forget:
        forget()
    else:  # torch before 2.13 forgets the end of a pass alone
        begin_anew(states, groups)
    reshard(groups)


@contextmanager
def keep_frozen(group: Any) -> Iterator[None]:
    """Around the gathering of weights: what the model has frozen stays frozen.

    A model may freeze its weights for a while (a sampler does): FSDP2 would keep what held when a
    weight was first gathered.
    """
    is_whole = group.is_unsharded  # the parameters that the model has are then the whole ones
    yield
    for param in group.fsdp_params:
        whole, shard = param._unsharded_param, param.sharded_param  # noqa: SLF001
        if is_whole:
            shard.requires_grad_(whole.requires_grad)
        else:
            whole.requires_grad_(shard.requires_grad)


def needing_gradient(inputs: Any) -> Any:
    """A module's inputs, of which each tensor that can have a gradient needs one."""

    def needing(tensor: torch.Tensor) -> torch.Tensor:
        is_real = tensor.is_floating_point() or tensor.is_complex()
        return tensor.detach().requires_grad_() if is_real and not tensor.requires_grad else tensor

    return tree_map_only(torch.Tensor, needing, inputs)


def post_forward(
    group: Any, inner: Callable[..., Any], module: nn.Module | None, inputs: Any, output: Any
) -> Any:
    """In place of a group's own post_forward(), `inner`: the output without views of the weights.

    A module may return a weight as it is, or expanded. FSDP2 frees the memory of gathered weights
    whether a view of it is left or not, and reading such a view would end the process.
    """
    gathered = {
        param._unsharded_param.untyped_storage().data_ptr()  # noqa: SLF001
        for param in group.fsdp_params
    }

    def own(tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) not in {torch.Tensor, nn.Parameter} or tensor.layout != torch.strided:
            return tensor
        is_view = tensor.numel() and tensor.untyped_storage().data_ptr() in gathered
        return tensor.clone() if is_view else tensor

    return inner(module, inputs, tree_map_only(torch.Tensor, own, output))
