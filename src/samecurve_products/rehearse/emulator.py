"""The emulator as `rehearse` uses it: whether it can run here, and the environment of a child.

No other file of this product imports the emulator's package.
"""

import os
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from samecurve.probe.engines import torch_build
from samecurve.seam import RunError, UserError, checkout, child_environment, show_bytes
from samecurve_products.rehearse.emulated_cuda import build
from samecurve_products.rehearse.emulated_cuda.machine import GPUS, Emulation
from samecurve_products.rehearse.emulated_cuda.report import Finding as Found
from samecurve_products.rehearse.emulated_cuda.report import ProcessReport
from samecurve_products.rehearse.emulated_cuda.report import read as read_reports

__all__ = [
    "Emulation",
    "Found",
    "ProcessReport",
    "build_emulator",
    "check_can_emulate",
    "environment_of",
    "gpu_names",
    "memory_of",
    "read_reports",
]

_VENV = "rehearse-venv"
_LEAST_DISK = 16 << 20  # bytes
_OWN_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def gpu_names() -> tuple[str, ...]:
    """The names of the GPUs that can be emulated."""
    return tuple(GPUS)


def check_can_emulate() -> None:
    """UserError: this torch, or this machine, can't emulate GPUs."""
    torch = torch_build()
    if torch is None:
        raise UserError(
            "rehearse needs torch, whose version could not be read", cpu_build_command(), "rehearse"
        )
    if torch.cuda or torch.hip:
        platform = f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.hip}"
        raise UserError(
            f"rehearse needs a CPU build of torch: torch {torch.version} here is built for"
            f" {platform}, so its own CUDA code stands where the emulated GPUs would be",
            f"make a virtual environment of its own: {cpu_build_command()}",
            "rehearse",
        )
    if build.lacks_compiler():
        raise UserError(
            "rehearse compiles the emulator once, and there is no g++",
            "install g++, such as with `apt install g++`, and run the same command again",
            "rehearse",
        )
    reason = build.why_not()
    if reason is not None:
        raise UserError(
            f"rehearse can't emulate GPUs here: {reason}",
            f"make a virtual environment of its own: {cpu_build_command()}",
            "rehearse",
        )


def build_emulator(say: Callable[[str], None]) -> None:
    """Compile the emulator for this torch, if that was not done before. RunError: it failed."""
    if not build.built_library().exists():
        say("compiling the emulator for this torch, once: about a minute")
    try:
        build.library()
    except build.CannotEmulateError as error:
        raise RunError(
            f"the emulator can't be compiled: {error}",
            "a newer g++; or report it with this text",
            "rehearse",
        ) from error


def cpu_build_command() -> str:
    """The command that makes a virtual environment with a CPU build of torch and this program."""
    source = checkout()
    program = f"-e {shlex.quote(str(source))}" if source else "samecurve"
    torch = f"'torch=={build.TORCH_VERSIONS[-1]}.*'"
    return (
        f"pip install uv && uv venv {_VENV} && uv pip install --python {_VENV} --torch-backend cpu"
        f" {program} {torch}; then {_VENV}/bin/samecurve rehearse ..."
    )


def memory_of(gpu: str) -> int:
    """Bytes of memory that this GPU has."""
    return GPUS[gpu].memory


def environment_of(emulation: Emulation, reports: Path) -> dict[str, str]:
    """The whole environment of a process that sees the emulated GPUs.

    reports: the directory where each such process writes what was found
    RunError: its disk is full, so that the writing would fail

    The programs of this Python (python, torchrun, accelerate) come first on its PATH, since the
    emulator is built for this Python's torch.
    """
    free = shutil.disk_usage(reports).free
    if free < _LEAST_DISK:
        raise RunError(
            f"{reports} has {show_bytes(free)} free, and what a rehearsal finds is written there",
            "free some space, or name another cache directory in SAMECURVE_CACHE",
            "rehearse",
        )
    environment = child_environment(**replace(emulation, report=reports).environment())
    for name in _OWN_VARIABLES:
        environment.pop(name, None)
    programs = str(Path(sys.executable).parent)
    environment["PATH"] = os.pathsep.join([programs, environment.get("PATH", os.defpath)])
    return environment
