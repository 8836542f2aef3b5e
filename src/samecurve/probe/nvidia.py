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

VISIBLE = "CUDA_VISIBLE_DEVICES"
T = TypeVar("T")
_NO_GPU = {"-1", "NoDevFiles"}  # entries that hide all GPUs after them


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
        driver = told(lambda: text(pynvml.nvmlSystemGetDriverVersion()), "")
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
            {int(process.pid) for process in running(handle)} for handle in handles(environment)
        ]
    except pynvml.NVMLError:
        processes = []
    with suppress(pynvml.NVMLError):
        pynvml.nvmlShutdown()
    return processes


def running(handle: Any) -> list[Any]:
    """The processes with a context on a GPU. NVMLError: they can't be read.

    pynvml's own function without a version raises what is no NVMLError, where the driver is older.
    """
    try:
        return list(pynvml.nvmlDeviceGetComputeRunningProcesses_v3(handle))
    except pynvml.NVMLError_FunctionNotFound:
        return list(pynvml.nvmlDeviceGetComputeRunningProcesses_v2(handle))


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
    return told(lambda: text(pynvml.nvmlDeviceGetUUID(handle)), "")


def _name(handle: Any) -> str:
    return told(lambda: text(pynvml.nvmlDeviceGetName(handle)), "NVIDIA GPU")


def _memory(handle: Any) -> int:
    """Bytes of the GPU's own memory; 0: the driver does not tell."""
    return told(lambda: int(pynvml.nvmlDeviceGetMemoryInfo(handle).total), 0)


def _capability(handle: Any) -> str:
    """The compute capability, such as "8.0"; '' where the driver does not say."""
    both = told(lambda: pynvml.nvmlDeviceGetCudaComputeCapability(handle), None)
    return f"{both[0]}.{both[1]}" if both else ""


def told(ask: Callable[[], T], default: T) -> T:
    """The driver's answer; the default where it has none, as older and smaller drivers."""
    try:
        return ask()
    except pynvml.NVMLError:
        return default


def text(value: str | bytes) -> str:
    """A text of pynvml's, which some of its versions give as bytes."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value
