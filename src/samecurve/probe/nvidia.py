"""NVIDIA GPUs by NVML: no context is made, no engine imported.

Indices are those a program sees under CUDA_VISIBLE_DEVICES.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pynvml

from samecurve.core.planning.machine import Device
from samecurve.errors import UserError

VISIBLE = "CUDA_VISIBLE_DEVICES"
_NONE = {"-1", "NoDevFiles"}  # what is said for no GPU at all


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
                index=seen,
                name=_text(pynvml.nvmlDeviceGetName(handle)),
                memory=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
                driver=driver,
            )
            for seen, handle in enumerate(_chosen(environment))
        )
    finally:
        pynvml.nvmlShutdown()


def handles(environment: Mapping[str, str]) -> list[Any]:
    """The driver's handle of each of devices(); its library stays open until nvmlShutdown().

    [] without a driver.
    """
    try:
        pynvml.nvmlInit()
        return _chosen(environment)
    except pynvml.NVMLError:
        return []


def processes_on_devices(environment: Mapping[str, str]) -> list[set[int]]:
    """The processes that have a context on each of devices(), by the ids that the driver knows: the
    host's, also in a container. [] where it can't be read.
    """
    try:
        found = [
            {int(process.pid) for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
            for handle in handles(environment)
        ]
    except pynvml.NVMLError:
        found = []
    with suppress(pynvml.NVMLError):
        pynvml.nvmlShutdown()
    return found


def _chosen(environment: Mapping[str, str]) -> list[Any]:
    return _visible(
        environment.get(VISIBLE),
        [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())],
    )


def _visible(variable: str | None, handles: list[Any]) -> list[Any]:
    """The handles behind the variable.

    CUDA itself hides what follows a bad entry; here it is refused.
    """
    if variable is None:
        return handles
    uuids = [_text(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    chosen = []
    for entry in filter(None, (part.strip() for part in variable.split(","))):
        if entry in _NONE:
            break
        matches = (
            [handles[int(entry)]]
            if entry.isdigit() and int(entry) < len(handles)
            else [
                h
                for h, uuid in zip(handles, uuids, strict=True)
                if uuid.startswith(entry) and not entry.isdigit()
            ]
        )
        if entry.startswith("MIG-"):
            with suppress(pynvml.NVMLError):
                matches = [pynvml.nvmlDeviceGetHandleByUUID(entry)]
        if len(matches) != 1:
            raise UserError(
                f"{VISIBLE}={variable} names {entry}, and this machine has GPUs"
                f" {', '.join(map(str, range(len(handles)))) or '(none)'}",
                f"correct it, or unset {VISIBLE}",
                VISIBLE,
            )
        chosen += matches
    return chosen


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
