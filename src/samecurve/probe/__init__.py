"""What machine this is.

Reads the operating system, the driver and the environment; imports no engine.
"""

import os

from samecurve.core.planning.machine import Machine
from samecurve.probe import cpu, nvidia


def probe() -> Machine:
    """This machine, as far as this process may use it.

    UserError: CUDA_VISIBLE_DEVICES names a GPU that isn't there.
    """
    return Machine(
        devices=nvidia.devices(os.environ),
        links=(),
        host_bytes=cpu.memory(),
        cores=cpu.cores(),
        cpu=cpu.model_name(),
    )
