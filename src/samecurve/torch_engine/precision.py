"""Number formats: weights in f32 (or f64), mixed precisions by autocast; and whether kernels give
the same bits each time.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from samecurve.core.config import Precision
from samecurve.core.planning.plan import Plan

Parameters = ParamSpec("Parameters")
T = TypeVar("T")

_TWO_BYTES = {"bf16": torch.bfloat16, "f16": torch.float16}


def weight_dtype(precision: Precision) -> torch.dtype:
    return torch.float64 if precision == "f64" else torch.float32


def as_weights(array: NDArray[Any], precision: Precision) -> NDArray[Any]:
    """Floating-point numbers of a batch in the format of the weights, as engine jax has them, so
    that a model can take them as they come; other numbers as they are.
    """
    wide = precision == "f64"
    if array.dtype.kind == "f":
        return array.astype(np.float64 if wide else np.float32, copy=False)
    if array.dtype.kind == "c":
        return array.astype(np.complex128 if wide else np.complex64, copy=False)
    return array


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one of this thread, so that what a model makes on "cuda" lies beside
    its weights.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def autocast_for(
    precision: Precision, device: torch.device, *, keeps_copies: bool = True
) -> AbstractContextManager[object]:
    """The context of a forward pass.

    keeps_copies: whether copies of weights in two bytes are kept until the context is left.
    """
    if precision not in _TWO_BYTES:
        return nullcontext()
    return torch.autocast(device.type, _TWO_BYTES[precision], cache_enabled=keeps_copies)


def keeps_copies(plan: Plan) -> bool:
    """Whether a weight that is used several times in a forward pass is rounded once for all uses.

    Gradients of these uses are then added in two bytes. All threads of a process share autocast's
    copies, and the first thread that leaves autocast drops those of the others. So under dp it
    would depend on the moment which uses share a copy; and runs that give the same bits on any
    devices have those of dp.
    """
    has_threads = plan.layout.num_devices > plan.layout.world_size
    return not plan.reruns_blocks and not plan.compute.deterministic and not has_threads


def in_precision(
    function: Callable[Parameters, T], plan: Plan, device: torch.device
) -> Callable[Parameters, T]:
    """The function under autocast_for(); the function itself where there is no autocast."""
    precision, keeps = plan.compute.precision, keeps_copies(plan)
    if precision not in _TWO_BYTES:
        return function

    def run(*arguments: Parameters.args, **options: Parameters.kwargs) -> T:
        with autocast_for(precision, device, keeps_copies=keeps):
            return function(*arguments, **options)

    return run


def on_device(function: Callable[Parameters, T], device: torch.device) -> Callable[Parameters, T]:
    """The function with this GPU as the current one; the function itself on a CPU."""
    if device.type != "cuda":
        return function

    def run(*arguments: Parameters.args, **options: Parameters.kwargs) -> T:
        with torch.cuda.device(device):
            return function(*arguments, **options)

    return run


@contextmanager
def attention_of_any_length() -> Iterator[None]:
    """Keep attention from cuDNN's kernels, which build a plan for each new shape: torch prefers
    them on GPUs of Hopper and later, and a text that is being written has a new shape at every
    token.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def set_deterministic(enabled: bool, device: torch.device) -> None:  # noqa: FBT001 - as torch's own
    """Choose kernels that give the same bits each time; or, when disabled, the fastest kernels.

    An operation that has no deterministic kernel raises an error when it runs.

    device: where the process computes
    """
    if device.type == "cuda":  # where the compiler is told too, whenever a user's code imports it
        torch.use_deterministic_algorithms(enabled)
    else:
        refuse_nondeterministic(enabled)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = enabled
    torch.backends.cuda.enable_cudnn_sdp(not enabled)  # its backward has no deterministic form


def refuse_nondeterministic(enabled: bool, /) -> None:  # noqa: FBT001 - as torch's own
    """Let operations without a deterministic kernel raise an error when they run; or not.

    torch.use_deterministic_algorithms() would import torch's compiler, to tell it too: 2 s of a
    start. prepare_compiler() tells it where something is compiled.
    """
    torch.set_deterministic_debug_mode("error" if enabled else "default")
    if "torch._inductor" in sys.modules:
        torch.use_deterministic_algorithms(enabled)
