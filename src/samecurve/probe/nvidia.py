"""NVIDIA GPUs, read through NVML: no context is made, no engine imported.

Indices are those a program sees under CUDA_VISIBLE_DEVICES.
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import pynvml

from samecurve.core.planning.machine import Device
from samecurve.errors import UserError

VISIBLE = "CUDA_VISIBLE_DEVICES"
T = TypeVar("T")
_NO_GPU = {"-1", "NoDevFiles"}  # entries that hide all GPUs after them


def devices(environment: Mapping[str, str]) -> tuple[Device, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves visible, in its order; all in PCI order without it.

    () without a driver.

    UserError: the variable names a GPU that isn't there.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        return tuple(
            Device(
                kind="cuda",
                index=index,
                name=_text(pynvml.nvmlDeviceGetName(handle)),
                memory=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
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
            {int(process.pid) for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
            for handle in handles(environment)
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
    indices = range(pynvml.nvmlDeviceGetCount())
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in indices]
    return choose_visible(VISIBLE, environment, handles, _match, hide_all=_NO_GPU)


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
    uuids = [_text(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    return [handle for handle, uuid in zip(handles, uuids, strict=True) if uuid.startswith(entry)]


def _capability(handle: Any) -> str:
    """The compute capability, such as "8.0"; '' where the driver does not say."""
    try:
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    except pynvml.NVMLError:
        return ""
    return f"{major}.{minor}"


def _text(value: str | bytes) -> str:
    if isinstance(value, bytes):
        return value.decode()
    return value
