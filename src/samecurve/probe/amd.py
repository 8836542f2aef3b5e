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
from samecurve.probe.gpu_state import GpuState, gpu_processes
from samecurve.probe.nvidia import choose_visible

TOPOLOGY = Path("/sys/class/kfd/kfd/topology")
_HIP = "HIP_VISIBLE_DEVICES"
_RUNTIME = "ROCR_VISIBLE_DEVICES"  # applied first, by the layer below HIP
VARIABLES = (_RUNTIME, _HIP)


def devices(environment: Mapping[str, str], topology: Path | None = None) -> tuple[Device, ...]:
    """The GPUs that the variables leave visible, in their order. () without the driver.

    topology: what the kernel's driver lays out; TOPOLOGY if not given

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
        for index, gpu in enumerate(_visible(environment, topology or TOPOLOGY))
    )


def states(environment: Mapping[str, str], topology: Path | None = None) -> list[GpuState]:
    """The state of each of devices(). UserError: as devices()."""
    return [
        GpuState(
            uuid=gpu.unique_id,
            free=None if gpu.used is None else gpu.memory - gpu.used,
            uncorrected_errors=gpu.uncorrected_errors,
            processes=gpu_processes(gpu.processes),
            bus=gpu.bus,
        )
        for gpu in _visible(environment, topology or TOPOLOGY)
    ]


def links(
    environment: Mapping[str, str], topology: Path | None = None
) -> dict[tuple[int, int], str]:
    """The paths between the visible GPUs, in both orders: XGMI or PCIe, as the kernel tells them.

    UserError: as devices().
    """
    home = topology or TOPOLOGY
    nodes = {gpu.unique_id: gpu.order for gpu in from_kernel(home)}
    visible = _visible(environment, home)
    by_node = {
        nodes[gpu.unique_id]: index
        for index, gpu in enumerate(visible)
        if gpu.unique_id in nodes and len(nodes) >= len(visible)
    }
    return {
        (by_node[first], by_node[second]): path
        for (first, second), path in read_links(home).items()
        if first in by_node and second in by_node
    }


def hip_variable(environment: Mapping[str, str]) -> str:
    """The variable that HIP reads: CUDA's where only that is set."""
    if not environment.get(_HIP) and "CUDA_VISIBLE_DEVICES" in environment:
        return "CUDA_VISIBLE_DEVICES"
    return _HIP


def _visible(environment: Mapping[str, str], topology: Path) -> list[AmdGpu]:
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
