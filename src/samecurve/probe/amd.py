"""AMD GPUs: through AMD's library (amdsmi), else its command (rocm-smi), else the kernel's files.

The first source that knows a GPU is believed. Indices are those that a program sees under
HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES: all sources are put into the order of the kernel's
nodes. No context is made on a GPU. RCCL, AMD's NCCL, is called `nccl` in torch.
"""

from collections.abc import Mapping
from pathlib import Path

from samecurve.core.planning.machine import Device
from samecurve.probe.amd_sources import (
    AmdGpu,
    from_command,
    from_kernel,
    from_library,
    read_links,
)
from samecurve.probe.nvidia import choose_visible

_HIP = "HIP_VISIBLE_DEVICES"
_RUNTIME = "ROCR_VISIBLE_DEVICES"  # applied first, by the layer below HIP
VARIABLES = (_RUNTIME, _HIP)


def devices(environment: Mapping[str, str], topology: Path) -> tuple[Device, ...]:
    """The GPUs that the variables leave visible, in their order.

    topology: the directory that the kernel's driver lays out

    UserError: a variable names a GPU that isn't there.
    """
    return tuple(
        Device(
            kind="cuda",
            index=index,
            name=f"AMD {gpu.name.removeprefix('AMD ')}",
            memory=gpu.memory,
            driver=gpu.driver,
        )
        for index, gpu in enumerate(visible(environment, topology))
    )


def links(environment: Mapping[str, str], topology: Path) -> dict[tuple[int, int], str]:
    """The paths between the visible GPUs, in both orders: XGMI or PCIe, as the kernel tells them.

    UserError: as devices().
    """
    nodes = {gpu.unique_id: gpu.order for gpu in from_kernel(topology)}
    shown = visible(environment, topology)
    by_node = {
        nodes[gpu.unique_id]: index
        for index, gpu in enumerate(shown)
        if gpu.unique_id in nodes and len(nodes) >= len(shown)
    }
    return {
        (by_node[first], by_node[second]): path
        for (first, second), path in read_links(topology).items()
        if first in by_node and second in by_node
    }


def hip_variable(environment: Mapping[str, str]) -> str:
    """The variable that HIP reads: CUDA's where only that is set."""
    if not environment.get(_HIP) and "CUDA_VISIBLE_DEVICES" in environment:
        return "CUDA_VISIBLE_DEVICES"
    return _HIP


def visible(environment: Mapping[str, str], topology: Path) -> list[AmdGpu]:
    """The GPUs of the first source that knows some, as devices(). UserError: as devices()."""
    gpus = from_library() or from_command(environment) or from_kernel(topology)
    gpus.sort(key=lambda gpu: gpu.order)
    for name in (_RUNTIME, hip_variable(environment)):
        gpus = choose_visible(name, environment, gpus, _match, hide_all={"-1"})
    return gpus


def _match(entry: str, gpus: list[AmdGpu]) -> list[AmdGpu]:
    """entry: an index, or a GPU's id."""
    return [
        gpu
        for index, gpu in enumerate(gpus)
        if entry == str(index) or entry.lower() == gpu.unique_id.lower()
    ]
