"""A stand-in for pynvml, which tells of the emulated GPUs.

It stands before the installed pynvml on PYTHONPATH. Constants and exceptions are those of the
installed one. Without emulated GPUs of NVIDIA it says what pynvml says on a machine without a
driver. A function that the emulator does not answer raises NVMLError_NotSupported.
"""

# ruff: noqa: N802, N816

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from samecurve_products.rehearse.emulated_cuda import gpus
from samecurve_products.rehearse.emulated_cuda.gpus import emulated_machine

_HERE = Path(__file__).resolve().parent


def _installed() -> ModuleType:
    """The pynvml that this one hides, under another name: it fills in its exceptions by name."""
    elsewhere = [place for place in sys.path if Path(place or ".").resolve() != _HERE]
    found = PathFinder.find_spec("pynvml", elsewhere)
    if found is None or found.origin is None:
        raise ImportError("no pynvml is installed: pip install nvidia-ml-py")
    spec = spec_from_file_location("installed_pynvml", found.origin)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


_real = _installed()
NVMLError = _real.NVMLError
_MACHINE = emulated_machine(os.environ, gpus.NVIDIA)
_utilisation = gpus.Utilisation()


def __getattr__(name: str) -> Any:
    """A constant or an exception of pynvml's, or a function that says that it is not supported."""
    value = getattr(_real, name)
    if not name.startswith("nvml") or not callable(value):
        return value

    def unsupported(*_: object) -> None:
        raise NVMLError(_real.NVML_ERROR_NOT_SUPPORTED)

    return unsupported


def nvmlInit() -> None:
    if not _MACHINE.gpus:
        raise NVMLError(_real.NVML_ERROR_LIBRARY_NOT_FOUND)


def nvmlShutdown() -> None:
    """Nothing is held open."""


def nvmlSystemGetDriverVersion() -> str:
    return gpus.DRIVER[gpus.NVIDIA]


def nvmlSystemGetCudaDriverVersion() -> int:
    major, minor = gpus.CUDA.split(".")
    return int(major) * 1000 + int(minor) * 10


def nvmlDeviceGetCount() -> int:
    return len(_MACHINE.gpus)


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    """A handle is the GPU's index."""
    if not 0 <= index < len(_MACHINE.gpus):
        raise NVMLError(_real.NVML_ERROR_INVALID_ARGUMENT)
    return _reached(index)


def nvmlDeviceGetHandleByUUID(uuid: str) -> int:
    for index in range(len(_MACHINE.gpus)):
        if nvmlDeviceGetUUID(index) == uuid:
            return _reached(index)
    raise NVMLError(_real.NVML_ERROR_NOT_FOUND)


def nvmlDeviceGetName(handle: int) -> str:
    return _MACHINE.gpus[_reached(handle)].name


def nvmlDeviceGetUUID(handle: int) -> str:
    return gpus.id_of(handle, gpus.NVIDIA)


def nvmlDeviceGetMemoryInfo(handle: int) -> SimpleNamespace:
    total, used = _MACHINE.gpus[_reached(handle)].memory, _MACHINE.used(handle)
    return SimpleNamespace(total=total, used=used, free=total - used)


def nvmlDeviceGetCudaComputeCapability(handle: int) -> tuple[int, int]:
    return _MACHINE.gpus[_reached(handle)].capability


def nvmlDeviceGetPciInfo(handle: int) -> SimpleNamespace:
    return SimpleNamespace(busId=f"0000{gpus.bus_address(_reached(handle)).upper()}")


def nvmlDeviceGetCurrPcieLinkWidth(handle: int) -> int:
    _reached(handle)
    return 16


nvmlDeviceGetMaxPcieLinkWidth = nvmlDeviceGetCurrPcieLinkWidth


def nvmlDeviceGetComputeMode(handle: int) -> int:
    _reached(handle)
    return int(_real.NVML_COMPUTEMODE_DEFAULT)


def nvmlDeviceGetTotalEccErrors(handle: int, kind: int, since: int) -> int:
    """Errors that were not corrected; the emulator counts no others, and from its start."""
    del since
    if _MACHINE.gpus[_reached(handle)].name in gpus.WITHOUT_ECC:
        raise NVMLError(_real.NVML_ERROR_NOT_SUPPORTED)
    uncorrected = kind == _real.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    return _MACHINE.faults(handle).uncorrected_errors if uncorrected else 0


def nvmlDeviceGetCurrentClocksThrottleReasons(handle: int) -> int:
    return _MACHINE.faults(_reached(handle)).slowdowns


def nvmlDeviceGetTemperature(handle: int, sensor: int) -> int:
    if sensor != _real.NVML_TEMPERATURE_GPU:
        raise NVMLError(_real.NVML_ERROR_INVALID_ARGUMENT)
    return _MACHINE.faults(_reached(handle)).celsius


def nvmlDeviceGetUtilizationRates(handle: int) -> SimpleNamespace:
    return SimpleNamespace(gpu=round(100 * _utilisation.read(_MACHINE, _reached(handle))), memory=0)


def nvmlDeviceGetPowerUsage(handle: int) -> int:
    """Milliwatts; the emulator does not know what work would take."""
    _reached(handle)
    return 70_000


def nvmlDeviceGetComputeRunningProcesses_v3(handle: int) -> list[SimpleNamespace]:
    uses = _MACHINE.uses(_reached(handle))
    return [SimpleNamespace(pid=use.pid, usedGpuMemory=use.memory) for use in uses]


def nvmlDeviceGetP2PStatus(one: int, other: int, capability: object) -> int:
    """Every GPU reads the others' memory; by NVLink if it has any."""
    _reached(other)
    if capability == _real.NVML_P2P_CAPS_INDEX_NVLINK and not _nvlinks(one):
        return int(_real.NVML_P2P_STATUS_NOT_SUPPORTED)
    return int(_real.NVML_P2P_STATUS_OK)


def nvmlDeviceGetTopologyCommonAncestor(one: int, other: int) -> int:
    """All GPUs are plugged in at one processor."""
    _reached(one), _reached(other)
    return int(_real.NVML_TOPOLOGY_HOSTBRIDGE)


def nvmlDeviceGetNvLinkState(handle: int, link: int) -> int:
    if link >= _nvlinks(handle):
        raise NVMLError(_real.NVML_ERROR_INVALID_ARGUMENT)
    return int(_real.NVML_FEATURE_ENABLED)


def nvmlDeviceGetNvLinkRemotePciInfo(handle: int, link: int) -> SimpleNamespace:
    """The links go to a switch, and not straight to another GPU."""
    nvmlDeviceGetNvLinkState(handle, link)
    return SimpleNamespace(busId="00000000:FE:00.0")


def _nvlinks(handle: int) -> int:
    """How many NVLinks the GPU has."""
    return gpus.NVLINKS.get(_MACHINE.gpus[_reached(handle)].name, 0)


def _reached(handle: int) -> int:
    """The handle, if the driver still reaches the GPU."""
    if _MACHINE.faults(handle).lost:
        raise NVMLError(_real.NVML_ERROR_GPU_IS_LOST)
    return handle
