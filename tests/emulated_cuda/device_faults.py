"""GPUs that fail while they work: a test plans when, and in which words of CUDA's.

The plan lies in the directory that the processes of the emulated machine share (gpus.STATE). The
process that makes the planned backward pass on the GPU takes the plan away and lets the GPU fail:
from then on every call on it raises torch.AcceleratorError, in this process. A later command, or a
restarted rank, finds a sound GPU.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_FILE = "failing-gpu.json"


@dataclass(frozen=True, kw_only=True)
class DeviceFault:
    """A GPU that fails."""

    gpu: int
    error: str  # as CUDA says it: unspecified launch failure
    code: int  # of cudaError_t
    backward: int  # the pass, counted from 1 in each process, in which it fails


ASSERTION = "device-side assert triggered", 710
LAUNCH_FAILURE = "unspecified launch failure", 719
ECC = "uncorrectable ECC error encountered", 214
ILLEGAL_ADDRESS = "an illegal memory access was encountered", 700
LOST = "unknown error", 999  # the GPU has fallen off the bus


def plan_fault(state: Path, fault: DeviceFault) -> None:
    """Plan one fault. state: the directory in EMULATED_CUDA_STATE"""
    (state / _FILE).write_text(json.dumps(asdict(fault)))


def watch_for_faults(torch: Any, state: Path, fail_device: Callable[[int, str, int], None]) -> None:
    """Let the planned fault happen in this process, if there is one.

    torch: the module
    fail_device: of the native part: lets a GPU fail with an error and its code
    """
    plan = state / _FILE
    if not plan.exists():
        return
    fault = DeviceFault(**json.loads(plan.read_text()))
    backward, passes = torch.autograd.backward, 0

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal passes
        passes += torch.cuda.current_device() == fault.gpu
        if passes == fault.backward and torch.cuda.current_device() == fault.gpu:
            plan.unlink(missing_ok=True)
            fail_device(fault.gpu, fault.error, fault.code)
        return backward(*arguments, **options)

    torch.autograd.backward = counted
