"""What devices, and the processes that drive them, are doing right now.

A value that can't be read is None, and a quantity that no device has is left out: no reading fails,
and none opens a context on a GPU.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import psutil
import pynvml

from samecurve.core.planning.machine import Device
from samecurve.probe import nvidia


class DeviceLoad(NamedTuple):
    """Of one device. utilisation: share of the time (GPU) or of its threads (CPU rank) at work."""

    utilisation: float | None = None
    memory_bytes: float | None = None
    power_watts: float | None = None
    celsius: float | None = None


class Sensors:
    """Of a plan's devices.

    owners: which process drives each. threads: of a CPU rank's operations.
    """

    def __init__(self, devices: Sequence[Device], owners: Sequence[int], threads: int) -> None:
        self._devices, self._owners, self._threads = devices, owners, threads
        self._handles = nvidia.handles(os.environ) if devices[0].kind == "cuda" else []
        self._seen: dict[
            int, tuple[psutil.Process, float, float]
        ] = {}  # CPU seconds of a process, and when
        psutil.cpu_percent()  # the first answer means nothing

    def read(self, pids: Mapping[int, int]) -> dict[str, Any]:
        """The values of a `sensors` event.

        pids: of the processes that live on this host; what the others drive is not read.
        """
        processes = [self._process(pids.get(index)) for index in range(max(self._owners) + 1)]
        loads = [
            self._device(device, owner in pids, *processes[owner])
            for device, owner in zip(self._devices, self._owners, strict=True)
        ]
        found = {
            f"{name}_by_device": [load[place] for load in loads]
            for place, name in enumerate(DeviceLoad._fields)
        }
        found |= {
            "cores_by_process": [cores for cores, _ in processes],
            "memory_bytes_by_process": [held for _, held in processes],
        }
        host = {
            "host_utilisation": round(psutil.cpu_percent() / 100, 3),
            "host_memory_bytes": _host_memory(),
        }
        return {
            name: values
            for name, values in found.items()
            if any(value is not None for value in values)
        } | host

    def close(self) -> None:
        if self._handles:
            pynvml.nvmlShutdown()

    def _device(
        self, device: Device, here: bool, cores: float | None, held: int | None
    ) -> DeviceLoad:
        if (
            device.kind == "cpu"
        ):  # one process for several of them: which of them works can't be told
            return (
                DeviceLoad(
                    None if cores is None else round(min(1.0, cores / self._threads), 3), held
                )
                if len(self._owners) == max(self._owners) + 1
                else DeviceLoad()
            )
        if not here or device.index >= len(self._handles):
            return DeviceLoad()
        handle = self._handles[device.index]
        return DeviceLoad(
            _gpu(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100),
            _gpu(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).used),
            _gpu(lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000),
            _gpu(lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),
        )

    def _process(self, pid: int | None) -> tuple[float | None, int | None]:
        """Cores it kept busy since the reading before, None on the first; bytes it holds."""
        if pid is None:
            return None, None
        try:
            process, before, spent = self._seen.get(pid) or (psutil.Process(pid), 0.0, 0.0)
            with process.oneshot():
                times, held = process.cpu_times(), int(process.memory_info().rss)
        except psutil.Error:  # it has just ended
            return None, None
        now, total = time.monotonic(), times.user + times.system
        self._seen[pid] = process, now, total
        return round((total - spent) / (now - before), 3) if before else None, held


def _gpu(read: Callable[[], float]) -> float | None:
    try:
        return read()
    except pynvml.NVMLError:
        return None


def _host_memory() -> int:
    memory = psutil.virtual_memory()
    return int(memory.total - memory.available)
