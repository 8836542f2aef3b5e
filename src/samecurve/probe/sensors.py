"""Readings of devices and of the processes that drive them: load, memory, power, temperature.

A value that can't be read is None, and a quantity that no device has is left out. No reading fails,
and none opens a context on a GPU.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import pynvml

from samecurve import probe
from samecurve.core.planning.machine import Device
from samecurve.probe import nvidia

if TYPE_CHECKING:
    from pathlib import Path

    from samecurve.probe.gpu_health import GpuHealth


class DeviceLoad(NamedTuple):
    """A reading of one device. The field names are those of a `sensors` event."""

    utilisation: float | None = None  # share of the time (GPU) or of its threads (CPU rank) at work
    memory_bytes: float | None = None
    power_watts: float | None = None
    celsius: float | None = None


class ProcessLoad(NamedTuple):
    cores: float | None = None  # busy since the last reading; None for the first reading
    memory_bytes: int | None = None


class _LastReading(NamedTuple):
    process: psutil.Process
    at: float  # seconds
    cpu_seconds: float


class Sensors:
    """Reads the devices of a plan.

    owners: the number of the process that drives each device
    threads: of a CPU rank's operations
    """

    def __init__(self, devices: Sequence[Device], owners: Sequence[int], threads: int) -> None:
        self._devices, self._owners, self._threads = devices, owners, threads
        self._handles: list[Any] = []  # of NVIDIA's GPUs
        self._cards: list[Path] = []  # of AMD's
        if devices[0].kind == "cuda":
            self._handles = nvidia.handles(os.environ)
            if not self._handles and probe.TOPOLOGY.is_dir():
                from samecurve.probe import amd_load

                self._cards = amd_load.find_cards(os.environ, probe.TOPOLOGY)
        self._readings: dict[int, _LastReading] = {}  # by process id
        psutil.cpu_percent()  # the first answer means nothing

    def read(self, pids: Mapping[int, int]) -> dict[str, object]:
        """The values of a `sensors` event.

        pids: of the processes that live on this host; what the others drive is not read.
        """
        processes = [self._read_process(pids.get(index)) for index in range(max(self._owners) + 1)]
        loads = [
            self._read_device(device, processes[owner], is_here=owner in pids)
            for device, owner in zip(self._devices, self._owners, strict=True)
        ]
        readings: dict[str, list[float | None]] = {
            f"{name}_by_device": [load[place] for load in loads]
            for place, name in enumerate(DeviceLoad._fields)
        }
        readings["cores_by_process"] = [process.cores for process in processes]
        readings["memory_bytes_by_process"] = [process.memory_bytes for process in processes]
        known = {
            name: values
            for name, values in readings.items()
            if any(value is not None for value in values)
        }
        memory = psutil.virtual_memory()
        return {
            **known,
            "host_utilisation": round(psutil.cpu_percent() / 100, 3),
            "host_memory_bytes": int(memory.total - memory.available),
        }

    def gpu_health(self) -> "GpuHealth | None":
        """Finds what goes wrong with NVIDIA's GPUs from now on; None: there are none."""
        if not self._handles:
            return None
        from samecurve.probe.gpu_health import GpuHealth

        return GpuHealth(self._handles)

    def close(self) -> None:
        if self._handles:
            pynvml.nvmlShutdown()

    def _read_device(self, device: Device, process: ProcessLoad, *, is_here: bool) -> DeviceLoad:
        """Read one device. is_here: the process that drives it lives on this host."""
        if device.kind == "cpu":
            return self._read_cpu(process)
        if is_here and device.index < len(self._cards):
            from samecurve.probe import amd_load

            return DeviceLoad(*amd_load.read_card(self._cards[device.index]))
        if not is_here or device.index >= len(self._handles):
            return DeviceLoad()
        handle = self._handles[device.index]
        return DeviceLoad(
            _gpu(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100),
            _gpu(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).used),
            _gpu(lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000),
            _gpu(lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),
        )

    def _read_cpu(self, process: ProcessLoad) -> DeviceLoad:
        num_processes = max(self._owners) + 1
        if len(self._owners) > num_processes:  # a process's load can't be split over its devices
            return DeviceLoad()
        if process.cores is None:
            return DeviceLoad(None, process.memory_bytes)
        return DeviceLoad(round(min(1.0, process.cores / self._threads), 3), process.memory_bytes)

    def _read_process(self, pid: int | None) -> ProcessLoad:
        if pid is None:
            return ProcessLoad()
        before = self._readings.get(pid)
        try:
            process = before.process if before else psutil.Process(pid)
            with process.oneshot():
                times, memory_bytes = process.cpu_times(), int(process.memory_info().rss)
        except psutil.Error:  # the process has just ended
            return ProcessLoad()
        now = _LastReading(process, time.monotonic(), times.user + times.system)
        self._readings[pid] = now
        if before is None:
            return ProcessLoad(None, memory_bytes)
        cores = (now.cpu_seconds - before.cpu_seconds) / (now.at - before.at)
        return ProcessLoad(round(cores, 3), memory_bytes)


def _gpu(read: Callable[[], float]) -> float | None:
    try:
        return read()
    except pynvml.NVMLError:
        return None
