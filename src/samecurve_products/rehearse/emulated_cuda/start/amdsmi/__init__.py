"""A stand-in for amdsmi, AMD's library, which tells of the emulated GPUs.

It answers the questions that probe/amd_sources.py asks. Without emulated GPUs of AMD its start
fails, as amdsmi's does on a machine without a driver.
"""

import os

from samecurve_products.rehearse.emulated_cuda import gpus
from samecurve_products.rehearse.emulated_cuda.gpus import AMD, emulated_machine

_MACHINE = emulated_machine(os.environ, AMD)
_MIB = 1 << 20


class AmdSmiLibraryException(Exception):  # noqa: N818
    """The driver can't answer."""


def amdsmi_init() -> None:
    if not _MACHINE.gpus:
        raise AmdSmiLibraryException("no AMD GPU is emulated")


def amdsmi_shut_down() -> None:
    """Nothing is held open."""


def amdsmi_get_processor_handles() -> list[int]:
    """The GPUs that the driver reaches. A handle is the GPU's index."""
    return [index for index in range(len(_MACHINE.gpus)) if not _MACHINE.faults(index).lost]


def amdsmi_get_gpu_asic_info(handle: int) -> dict[str, str]:
    gpu = _MACHINE.gpus[handle]
    return {
        "market_name": gpu.name,
        "asic_serial": hex(gpus.unique_id(handle)),
        "target_graphics_version": gpu.gcn_arch.partition(":")[0],
    }


def amdsmi_get_gpu_vram_usage(handle: int) -> dict[str, int]:
    """In MiB."""
    total, used = _MACHINE.gpus[handle].memory, _MACHINE.used(handle)
    return {"vram_total": total // _MIB, "vram_used": used // _MIB}


def amdsmi_get_gpu_enumeration_info(handle: int) -> dict[str, int]:
    return {"hip_id": handle}


def amdsmi_get_gpu_total_ecc_count(handle: int) -> dict[str, int]:
    errors = _MACHINE.faults(handle).uncorrected_errors
    return {"correctable_count": 0, "uncorrectable_count": errors}


def amdsmi_get_gpu_process_list(handle: int) -> list[dict[str, int]]:
    return [{"pid": use.pid, "mem": use.memory} for use in _MACHINE.uses(handle)]


def amdsmi_get_gpu_driver_info(handle: int) -> dict[str, str]:
    """Of the driver, which is one for all GPUs."""
    del handle
    return {"driver_version": gpus.DRIVER[AMD]}


def amdsmi_get_gpu_device_bdf(handle: int) -> str:
    return gpus.bus_address(handle)
