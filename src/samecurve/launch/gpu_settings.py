"""Environment variables of processes that train on GPUs. CUDA, torch's allocator and HIP read them
once, when they start.
"""

from collections.abc import Mapping
from importlib import metadata

from samecurve.core.planning.machine import AMD, NVIDIA

# the names of one setting
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def gpu_settings(vendor: str) -> dict[str, str]:
    """The variables to set, unless the user has set them.

    vendor: NVIDIA or AMD; '': there is no GPU.
    """
    wanted: dict[str, str] = {}
    if vendor:
        wanted |= {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    if vendor == NVIDIA:
        allocator = allocator_variable(_torch_version())
        wanted |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", allocator: "expandable_segments:True"}
    if vendor == AMD:
        wanted |= {
            "HSA_NO_SCRATCH_RECLAIM": "1",
            "HSA_ENABLE_SDMA": "1",
            "HSA_FORCE_FINE_GRAIN_PCIE": "1",
        }
    return wanted


def user_settings(wanted: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """The wanted variables that the user has set. The allocator's variable has several names."""
    names = set(wanted)
    if names & set(_ALLOCATOR):
        names |= set(_ALLOCATOR)
    return {name: value for name, value in environment.items() if name in names}


def without_user_settings(
    wanted: Mapping[str, str], environment: Mapping[str, str]
) -> dict[str, str]:
    """The wanted variables that the user has not set, under any of the allocator's names."""
    kept = set(user_settings(wanted, environment))
    if kept & set(_ALLOCATOR):
        kept |= set(_ALLOCATOR)
    return {name: value for name, value in wanted.items() if name not in kept}


def allocator_variable(torch_version: str | None) -> str:
    """The name of the allocator's variable. torch 2.9 has a new name, and warns of the old."""
    if torch_version is None:
        return "PYTORCH_ALLOC_CONF"
    major, minor = torch_version.split(".")[:2]
    is_new = (int(major), int(minor)) >= (2, 9)
    return "PYTORCH_ALLOC_CONF" if is_new else "PYTORCH_CUDA_ALLOC_CONF"


def _torch_version() -> str | None:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None
