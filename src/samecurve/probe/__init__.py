"""Describes this machine: its GPUs, cores and memory.

Reads the operating system, the driver, the environment and installed packages; imports no engine.
"""

import os
import re
from collections.abc import Mapping

from samecurve.core.planning.machine import Machine
from samecurve.probe import cpu
from samecurve.probe.engines import unfit_engines
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
        threads=_threads(os.environ),
        xla_devices=_xla_devices(os.environ),
        unfit=unfit_engines(gpus.vendor),
    )


def _threads(environment: Mapping[str, str]) -> int | None:
    """The threads that OMP_NUM_THREADS asks for; torchrun's own default of 1 asks for nothing."""
    first = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    is_default = first == "1" and "TORCHELASTIC_RUN_ID" in environment
    is_number = re.fullmatch(r"[1-9]\d{0,4}", first, re.ASCII) is not None
    return int(first) if is_number and not is_default else None


def _xla_devices(environment: Mapping[str, str]) -> int | None:
    """How many CPU devices XLA_FLAGS asks for; of several such flags XLA obeys the last."""
    counts = re.findall(
        r"--xla_force_host_platform_device_count=(\d+)", environment.get("XLA_FLAGS", "")
    )
    return int(counts[-1]) if counts else None
