"""Describes this machine: its GPUs, cores and memory.

Reads the operating system, the driver, the environment and installed packages; imports no engine.
"""

import os
import re
from collections.abc import Mapping

from samecurve.core.planning.machine import Machine, UnfitEngine
from samecurve.probe import cpu
from samecurve.probe.gpus import find_gpus


def probe() -> Machine:
    """This machine, as far as this process may use it.

    UserError: a variable such as CUDA_VISIBLE_DEVICES names a GPU that isn't there.
    """
    gpus = find_gpus(os.environ)
    return Machine(
        devices=gpus.devices,
        links=(),
        host_bytes=cpu.memory(),
        cores=cpu.cores(),
        cpu=cpu.model_name(),
        xla_devices=_xla_devices(os.environ),
        unfit=_unfit_engines(gpus.vendor),
    )


def _unfit_engines(vendor: str) -> dict[str, UnfitEngine]:
    """Why installed engines can't use the GPUs of this vendor ('': there are none)."""
    if not vendor:
        return {}
    from samecurve.probe.engines import unfit_engines

    return unfit_engines(vendor)


def _xla_devices(environment: Mapping[str, str]) -> int | None:
    """How many CPU devices XLA_FLAGS asks for; of several such flags XLA obeys the last."""
    counts = re.findall(
        r"--xla_force_host_platform_device_count=(\d+)", environment.get("XLA_FLAGS", "")
    )
    return int(counts[-1]) if counts else None
