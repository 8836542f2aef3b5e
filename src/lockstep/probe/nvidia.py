"""NVIDIA GPUs by NVML: no context is made, no engine imported. Indices are those a program sees under CUDA_VISIBLE_DEVICES."""

from collections.abc import Mapping

import pynvml

from lockstep.core.machine import Device
from lockstep.errors import UserError

VISIBLE = "CUDA_VISIBLE_DEVICES"


def devices(environment: Mapping[str, str]) -> tuple[Device, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves visible, in its order; all in PCI order without it. () without a driver.

    UserError: the variable names a GPU that isn't there.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        uuids = [_text(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        chosen = _visible(environment.get(VISIBLE), uuids)
        return tuple(
            Device("cuda", seen, _text(pynvml.nvmlDeviceGetName(handles[real])), int(pynvml.nvmlDeviceGetMemoryInfo(handles[real]).total), driver)
            for seen, real in enumerate(chosen))
    finally:
        pynvml.nvmlShutdown()


def _visible(variable: str | None, uuids: list[str]) -> list[int]:
    """Physical indices behind the variable. CUDA itself hides what follows a bad entry; here it is refused."""
    if variable is None:
        return list(range(len(uuids)))
    chosen = []
    for entry in filter(None, (part.strip() for part in variable.split(","))):
        if entry == "-1":
            break
        matches = [int(entry)] if entry.isdigit() and int(entry) < len(uuids) else [i for i, uuid in enumerate(uuids) if uuid.startswith(entry) and not entry.isdigit()]
        if len(matches) != 1:
            raise UserError(f"{VISIBLE}={variable} names {entry}, and this machine has GPUs {', '.join(map(str, range(len(uuids)))) or '(none)'}", f"correct it, or unset {VISIBLE}", VISIBLE)
        chosen += matches
    return chosen


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
