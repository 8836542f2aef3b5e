"""What processes that train on GPUs find in their environment: variables that CUDA, torch's
allocator and HIP read once, as they start.
"""

from collections.abc import Mapping
from importlib import metadata

from samecurve.probe.gpus import AMD, NVIDIA

# one setting, by its names
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def gpu_settings(vendor: str) -> dict[str, str]:
    """What is set unless the user set it.

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
    """Of these what the user set, the allocator's by any of its names."""
    names = set(wanted)
    if names & set(_ALLOCATOR):
        names |= set(_ALLOCATOR)
    return {name: value for name, value in environment.items() if name in names}


def without_user_settings(
    wanted: Mapping[str, str], environment: Mapping[str, str]
) -> dict[str, str]:
    """Of these what the user did not set, the allocator's by any of its names."""
    kept = set(user_settings(wanted, environment))
    if kept & set(_ALLOCATOR):
        kept |= set(_ALLOCATOR)
    return {name: value for name, value in wanted.items() if name not in kept}


def allocator_variable(torch_version: str | None) -> str:
    """torch knows the new name since 2.9, and warns of the old one there; before, only the old one
    is read.
    """
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
