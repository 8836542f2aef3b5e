"""A model's view of torch.distributed, which is that of a process alone.

Models of libraries ask for the world, and take another branch where there is one: they build a
SyncBatchNorm, divide a loss by the world size, or compute a layer that they would have skipped.
While an engine of several processes lives, torch.distributed answers such code as on one device.
torch's own code and ours get the true answers.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from samecurve.errors import UserError
from samecurve.torch_engine.randomness.replaced_functions import ReplacedFunctions, Replacement

Function = Callable[..., Any]  # a function of torch takes its arguments in several forms

_OF_SEVERAL_DEVICES = ("torch", "samecurve", "samecurve_products")
_CODE_OF_MODELS = ("torch.nn.modules.", "torch.distributed.nn.")  # for the rest of torch see above
_COMPILER = "torch._dynamo."
_ANSWERS = {"is_initialized": False, "get_world_size": 1, "get_rank": 0}
_NEEDS_OTHERS = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "init_process_group",
    "irecv",
    "isend",
    "monitored_barrier",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
)


def _replacements(break_graphs: bool) -> Iterator[Replacement]:  # noqa: FBT001
    del break_graphs  # a compiler ends its graph at a function that reads frames
    for name, answer in _ANSWERS.items():
        yield Replacement.of(dist, name, _answering(getattr(dist, name), answer))
    for name in _NEEDS_OTHERS:
        yield Replacement.of(dist, name, _refusing(getattr(dist, name)))


# keeps a process's models from seeing other processes; of the process, as torch's functions are
ONE_DEVICE_VIEW = ReplacedFunctions(_replacements)


def _answering(original: Function, answer: object) -> Function:
    @functools.wraps(original)
    def function(*arguments: Any, **options: Any) -> Any:
        if arguments or options or not _is_called_by_model():  # a group that the caller knows
            return original(*arguments, **options)
        return answer

    return function


def _refusing(original: Function) -> Function:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def function(*arguments: Any, **options: Any) -> Any:
        if _is_called_by_model():
            group = signature.bind(*arguments, **options).arguments.get("group")
            if group is None:
                raise UserError(
                    f"the task calls torch.distributed.{original.__name__}(), which needs other"
                    " processes; a task's code sees one device",
                    "leave the call out: gradients, losses and metrics are summed over all devices"
                    " after it; or batch_loss, for a loss over the whole batch",
                    "task",
                )
        return original(*arguments, **options)

    return function


def _is_called_by_model() -> bool:
    """Whether the caller of the function that asks this is code of a model or a task."""
    frame = sys._getframe(2)  # noqa: SLF001 - so that nothing but the caller decides
    while frame.f_back and _module_of(frame).startswith(_COMPILER):
        frame = frame.f_back
    module = _module_of(frame)
    if module.startswith(_CODE_OF_MODELS):
        return True
    return module.partition(".")[0] not in _OF_SEVERAL_DEVICES


def _module_of(frame: Any) -> str:
    return f"{frame.f_globals.get('__name__', '')}."
