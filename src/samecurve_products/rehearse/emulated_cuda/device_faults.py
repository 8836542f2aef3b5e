"""GPUs that fail while they work: a test plans when, and in which words of CUDA's.

The plan lies in the directory that the processes of the emulated machine share (gpus.STATE). The
process that makes the planned backward pass on the GPU takes the plan away and lets the fault begin
as the pass has ended: a later command, or a restarted rank, finds a sound GPU. From then on every
call on the GPU raises torch.AcceleratorError in this process; or another program has taken memory.
"""

import json
import os
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from samecurve_products.rehearse.emulated_cuda.gpus import STATE

_FILE = "failing-gpu.json"


@dataclass(frozen=True, kw_only=True)
class DeviceFault:
    """What happens to a GPU, and when. error and code: of cudaError_t, as CUDA says it."""

    gpu: int  # the machine's number
    backward: int  # the pass, counted from 1 in each process, after which it happens
    error: str = ""  # '': the GPU itself stays sound
    code: int = 0
    memory_taken: int = 0  # bytes that another program takes


ASSERTION = "device-side assert triggered", 710
LAUNCH_FAILURE = "unspecified launch failure", 719
ECC = "uncorrectable ECC error encountered", 214
ILLEGAL_ADDRESS = "an illegal memory access was encountered", 700
LOST = "unknown error", 999  # the GPU has fallen off the bus


def plan_fault(state: Path, fault: DeviceFault) -> None:
    """Plan one fault. state: the directory in EMULATED_CUDA_STATE"""
    (state / _FILE).write_text(json.dumps(asdict(fault)))


def watch_for_faults() -> None:
    """Let planned faults happen in this process, and in those that are forked from it."""
    import torch

    backward, passes = torch.autograd.backward, Counter[int]()

    def counted(*arguments: Any, **options: Any) -> None:
        backward(*arguments, **options)
        state = os.environ.get(STATE)
        if state and torch.cuda.is_available():
            device = torch.cuda.current_device()
            passes[device] += 1
            _happen(Path(state) / _FILE, device, passes[device])

    torch.autograd.backward = counted


def _happen(plan: Path, device: int, passes: int) -> None:
    """Let the planned fault begin, if it is planned for now. device: as this process counts it"""
    if not plan.exists():
        return
    fault = DeviceFault(**json.loads(plan.read_text()))
    import emulated_cuda_native as native
    import torch

    from samecurve_products.rehearse.emulated_cuda.torch_streams import seen_gpus

    if (fault.gpu, fault.backward) != (seen_gpus()[device], passes):
        return
    plan.unlink()
    if fault.memory_taken:
        torch.cuda.empty_cache()  # else the next tensors find room in what torch keeps
        free, _ = torch.cuda.mem_get_info(device)
        native.take_memory(device, min(fault.memory_taken, free))
    if fault.error:
        native.fail_device(device, fault.error, fault.code)
