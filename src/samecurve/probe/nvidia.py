"""NVIDIA GPUs, read through NVML: no context is made, no engine imported.

Indices are those a program sees under CUDA_VISIBLE_DEVICES.
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import psutil
import pynvml

from samecurve.core.planning.machine import Device
from samecurve.errors import UserError
from samecurve.probe.gpu_state import GpuState, gpu_processes

VISIBLE = "CUDA_VISIBLE_DEVICES"
T = TypeVar("T")
_NO_GPU = {"-1", "NoDevFiles"}  # entries that hide all GPUs after them
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


def devices(environment: Mapping[str, str]) -> tuple[Device, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves visible, in its order; all in PCI order without it.

    () without a driver. A GPU whose memory the driver does not tell shares the host's, as those of
    a GB10 or a Jetson do.

    UserError: the variable names a GPU that isn't there, or one that the driver has lost.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        driver = _told(lambda: _text(pynvml.nvmlSystemGetDriverVersion()), "")
        return tuple(
            Device(
                kind="cuda",
                index=index,
                name=_name(handle),
                memory=_memory(handle) or psutil.virtual_memory().total,
                driver=driver,
                capability=_capability(handle),
            )
            for index, handle in enumerate(_visible_handles(environment))
        )
    finally:
        pynvml.nvmlShutdown()


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
        version = _told(pynvml.nvmlSystemGetCudaDriverVersion, 0)
        return f"{version // 1000}.{version % 1000 // 10}" if version else ""
    finally:
        pynvml.nvmlShutdown()


def states(environment: Mapping[str, str]) -> list[GpuState]:
    """The state of each of devices(). UserError: as devices()."""
    try:
        return [_state(handle) for handle in handles(environment)]
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _state(handle: Any) -> GpuState:
    processes = _told(lambda: _running(handle), [])
    bus = _told(lambda: _text(pynvml.nvmlDeviceGetPciInfo(handle).busId), "")
    lanes = _told(
        lambda: (
            int(pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle)),
            int(pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle)),
        ),
        None,
    )
    uncorrected = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
    return GpuState(
        uuid=_told(lambda: _text(pynvml.nvmlDeviceGetUUID(handle)), ""),
        free=_told(lambda: int(pynvml.nvmlDeviceGetMemoryInfo(handle).free), None),
        compute_mode=_COMPUTE_MODES.get(
            _told(lambda: pynvml.nvmlDeviceGetComputeMode(handle), None), ""
        ),
        uncorrected_errors=_told(
            lambda: int(pynvml.nvmlDeviceGetTotalEccErrors(handle, *uncorrected)), None
        ),
        slowdowns=_slowdowns(handle),
        processes=gpu_processes((process.pid, process.usedGpuMemory) for process in processes),
        bus=_sysfs_address(bus),
        lanes=lanes,
    )


def _running(handle: Any) -> list[Any]:
    """The processes with a context on a GPU. NVMLError: they can't be read.

    pynvml's own function without a version raises what is no NVMLError, where the driver is older.
    """
    try:
        return list(pynvml.nvmlDeviceGetComputeRunningProcesses_v3(handle))
    except pynvml.NVMLError_FunctionNotFound:
        return list(pynvml.nvmlDeviceGetComputeRunningProcesses_v2(handle))


def _slowdowns(handle: Any) -> tuple[str, ...]:
    bits = _told(lambda: int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)), 0)
    return tuple(word for bit, word in _SLOWDOWNS.items() if bits & bit)


def _sysfs_address(bus: str) -> str:
    """'00000000:3B:00.0' -> '0000:3b:00.0'."""
    domain, colon, rest = bus.lower().partition(":")
    return f"{domain[-4:]}{colon}{rest}"


def handles(environment: Mapping[str, str]) -> list[Any]:
    """The driver's handle of each of devices(); its library stays open until nvmlShutdown().

    [] without a driver.
    """
    try:
        pynvml.nvmlInit()
        return _visible_handles(environment)
    except pynvml.NVMLError:
        return []


def processes_on_devices(environment: Mapping[str, str]) -> list[set[int]]:
    """The processes that have a context on each of devices(); [] where it can't be read.

    By the ids that the driver knows: the host's, also in a container.
    """
    try:
        processes = [
            {int(process.pid) for process in _running(handle)} for handle in handles(environment)
        ]
    except pynvml.NVMLError:
        processes = []
    with suppress(pynvml.NVMLError):
        pynvml.nvmlShutdown()
    return processes


def _visible_handles(environment: Mapping[str, str]) -> list[Any]:
    """The handles behind the variable.

    CUDA itself hides what follows a bad entry; here it is refused.
    """
    try:
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError:
        return []
    every = [_handle(index) for index in range(count)]
    chosen = choose_visible(VISIBLE, environment, every, _match, hide_all=_NO_GPU)
    for handle in chosen:
        if isinstance(handle, _Lost):
            others = ",".join(str(index) for index in range(count) if index != handle.index)
            raise UserError(
                f"the driver has lost GPU {handle.index}: {handle.why}",
                "restart the machine (`dmesg | grep Xid` says what happened); until then"
                f" {VISIBLE}={others} leaves this GPU out",
            )
    return chosen


@dataclass(frozen=True)
class _Lost:
    """A GPU that the driver counts and can't reach: it has fallen off the bus, as a rule."""

    index: int
    why: str


def _handle(index: int) -> Any:
    try:
        return pynvml.nvmlDeviceGetHandleByIndex(index)
    except pynvml.NVMLError as error:
        return _Lost(index, str(error))


def choose_visible(
    variable: str,
    environment: Mapping[str, str],
    gpus: list[T],
    match: Callable[[str, list[T]], list[T]],
    *,
    hide_all: Collection[str],
) -> list[T]:
    """The GPUs that a variable leaves visible, in its order.

    match: (an entry of the variable, GPUs) -> the GPUs that the entry names
    hide_all: entries that hide all GPUs after them

    UserError: an entry names no GPU, or several.
    """
    value = environment.get(variable)
    if value is None:
        return gpus
    chosen: list[T] = []
    for entry in filter(None, (part.strip() for part in value.split(","))):
        if entry in hide_all:
            break
        matches = match(entry, gpus)
        if len(matches) != 1:
            there = ", ".join(map(str, range(len(gpus)))) or "(none)"
            raise UserError(
                f"{variable}={value} names {entry}, and this machine has GPUs {there}",
                f"correct it, or unset {variable}",
                variable,
            )
        chosen += matches
    return chosen


def _match(entry: str, handles: list[Any]) -> list[Any]:
    """entry: an index, the beginning of a GPU's UUID, or a MIG device's UUID."""
    if entry.isdigit():
        return handles[int(entry) : int(entry) + 1]
    if entry.startswith("MIG-"):
        with suppress(pynvml.NVMLError):
            return [pynvml.nvmlDeviceGetHandleByUUID(entry)]
    uuids = [_uuid(handle) for handle in handles]
    return [handle for handle, uuid in zip(handles, uuids, strict=True) if uuid.startswith(entry)]


def _uuid(handle: Any) -> str:
    if isinstance(handle, _Lost):
        return ""
    return _told(lambda: _text(pynvml.nvmlDeviceGetUUID(handle)), "")


def _name(handle: Any) -> str:
    return _told(lambda: _text(pynvml.nvmlDeviceGetName(handle)), "NVIDIA GPU")


def _memory(handle: Any) -> int:
    """Bytes of the GPU's own memory; 0: the driver does not tell."""
    return _told(lambda: int(pynvml.nvmlDeviceGetMemoryInfo(handle).total), 0)


def _capability(handle: Any) -> str:
    """The compute capability, such as "8.0"; '' where the driver does not say."""
    both = _told(lambda: pynvml.nvmlDeviceGetCudaComputeCapability(handle), None)
    return f"{both[0]}.{both[1]}" if both else ""


def _told(ask: Callable[[], T], default: T) -> T:
    """What the driver tells; the default where it does not, as older and smaller ones do."""
    try:
        return ask()
    except pynvml.NVMLError:
        return default


def _text(value: str | bytes) -> str:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value
