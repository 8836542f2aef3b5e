"""The state of each GPU beyond what a plan needs, as its driver tells it.

A value that the driver does not tell is None or empty. Nothing is guessed.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pynvml

from samecurve import probe
from samecurve.core.planning.machine import AMD, NVIDIA
from samecurve.probe import amd, nvidia
from samecurve.probe.amd_sources import AmdGpu
from samecurve.probe.nvidia import text, told

_FIRST_NAMESPACE = "pid:[4026531836]"  # of processes; Linux gives it this number
_COMPUTE_MODES = {
    pynvml.NVML_COMPUTEMODE_DEFAULT: "default",
    pynvml.NVML_COMPUTEMODE_EXCLUSIVE_THREAD: "exclusive",
    pynvml.NVML_COMPUTEMODE_PROHIBITED: "prohibited",
    pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: "exclusive",
}
# reasons that point to a fault; a power limit that is reached under load is none
_SLOWDOWNS = {
    pynvml.nvmlClocksThrottleReasonHwThermalSlowdown: "it is too hot",
    pynvml.nvmlClocksThrottleReasonSwThermalSlowdown: "it is near its highest temperature",
    pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown: "its power supply asks for it",
}


class GpuProcess(NamedTuple):
    """A process that uses a GPU."""

    pid: int  # as the driver counts it: the host's, also in a container
    name: str
    memory: int | None  # bytes


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """The state of one GPU."""

    uuid: str = ""
    free: int | None = None  # bytes of its memory
    compute_mode: str = ""  # default, exclusive or prohibited
    uncorrected_errors: int | None = None  # of its memory, since the driver was loaded
    slowdowns: tuple[str, ...] = ()  # why its clock is held down, in words
    processes: tuple[GpuProcess, ...] = ()
    bus: str = ""  # its address in /sys/bus/pci/devices: 0000:3b:00.0
    lanes: tuple[int, int] | None = None  # PCIe lanes: in use, and the most that it has


def gpu_states(vendor: str, environment: Mapping[str, str]) -> list[GpuState]:
    """The state of each of find_gpus(), in its order. vendor: as Gpus has it.

    UserError: as find_gpus().
    """
    if vendor == NVIDIA:
        return _nvidia_states(environment)
    if vendor == AMD:
        return amd_states(amd.visible(environment, probe.TOPOLOGY))
    return []


def visibility_variables() -> tuple[str, ...]:
    """The environment variables that hide GPUs."""
    return (nvidia.VISIBLE, *amd.VARIABLES)


def driver_fault() -> str:
    """Why NVIDIA's driver can't be asked, in its own words. '': it can, or there is none."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        return ""
    except pynvml.NVMLError as error:
        return str(error)
    pynvml.nvmlShutdown()
    return ""


def cuda_of_driver() -> str:
    """The newest CUDA that the driver can run, such as "12.4"; '' where it does not say."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ""
    try:
        version = told(pynvml.nvmlSystemGetCudaDriverVersion, 0)
        return f"{version // 1000}.{version % 1000 // 10}" if version else ""
    finally:
        pynvml.nvmlShutdown()


def _nvidia_states(environment: Mapping[str, str]) -> list[GpuState]:
    try:
        return [_state(handle) for handle in nvidia.handles(environment)]
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def amd_states(visible: Iterable[AmdGpu]) -> list[GpuState]:
    """The state of AMD's GPUs, from what a source tells."""
    return [
        GpuState(
            uuid=gpu.unique_id,
            free=None if gpu.used is None else gpu.memory - gpu.used,
            uncorrected_errors=gpu.uncorrected_errors,
            processes=_named(gpu.processes),
            bus=gpu.bus,
        )
        for gpu in visible
    ]


def _state(handle: Any) -> GpuState:
    no_processes: list[Any] = []
    processes = told(lambda: nvidia.running(handle), no_processes)
    bus = told(lambda: text(pynvml.nvmlDeviceGetPciInfo(handle).busId), "")
    lanes = told(
        lambda: (
            int(pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle)),
            int(pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle)),
        ),
        None,
    )
    return GpuState(
        uuid=told(lambda: text(pynvml.nvmlDeviceGetUUID(handle)), ""),
        free=told(lambda: int(pynvml.nvmlDeviceGetMemoryInfo(handle).free), None),
        compute_mode=_COMPUTE_MODES.get(
            told(lambda: pynvml.nvmlDeviceGetComputeMode(handle), None), ""
        ),
        uncorrected_errors=uncorrected_errors(handle),
        slowdowns=slowdowns(handle),
        processes=_named((process.pid, process.usedGpuMemory) for process in processes),
        bus=_sysfs_address(bus),
        lanes=lanes,
    )


def uncorrected_errors(handle: Any) -> int | None:
    """Errors of a GPU's memory that were not corrected, since the driver was loaded.

    None: the driver does not tell, as of a GPU without ECC.
    """
    uncorrected = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
    return told(lambda: int(pynvml.nvmlDeviceGetTotalEccErrors(handle, *uncorrected)), None)


def slowdowns(handle: Any) -> tuple[str, ...]:
    """Why a GPU's clock is held down, in words."""
    bits = told(lambda: int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)), 0)
    return tuple(word for bit, word in _SLOWDOWNS.items() if bits & bit)


def _sysfs_address(bus: str) -> str:
    """'00000000:3B:00.0' -> '0000:3b:00.0'."""
    domain, colon, rest = bus.lower().partition(":")
    return f"{domain[-4:]}{colon}{rest}"


def _named(uses: Iterable[tuple[int, int | None]]) -> tuple[GpuProcess, ...]:
    """The processes with their names. uses: (process id, bytes)."""
    return tuple(GpuProcess(pid, _name_of(pid), memory) for pid, memory in uses)


def _name_of(pid: int) -> str:
    if counts_as_driver():
        with suppress(psutil.Error, ValueError, OverflowError):
            return psutil.Process(pid).name()
    return "a process that is not seen from here"


def counts_as_driver() -> bool:
    """Whether this process counts processes as the driver does, and not anew, in a container."""
    try:
        return Path("/proc/self/ns/pid").readlink().name == _FIRST_NAMESPACE
    except OSError:
        return False
