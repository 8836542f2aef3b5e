"""What machine this is.

Reads the operating system, the driver, the environment and what is installed; imports no engine.
"""

import os

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
        unfit=unfit_engines(gpus.vendor),
    )
