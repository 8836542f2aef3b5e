"""The GPUs of this machine, from NVIDIA (nvidia.py) or AMD (amd.py, where its driver is loaded)."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from samecurve.core.planning.machine import Device
from samecurve.probe import nvidia

NVIDIA, AMD = "NVIDIA", "AMD"
TOPOLOGY = Path("/sys/class/kfd/kfd/topology")  # of the driver for AMD's GPUs


@dataclass(frozen=True)
class Gpus:
    """The GPUs that this process may use."""

    vendor: str  # '' without any
    devices: tuple[Device, ...]
    variable: str  # the environment variable that chooses among them


def find_gpus(environment: Mapping[str, str]) -> Gpus:
    """NVIDIA's GPUs, else AMD's, else none.

    UserError: an environment variable names a GPU that isn't there.
    """
    if devices := nvidia.devices(environment):
        return Gpus(NVIDIA, devices, nvidia.VISIBLE)
    if TOPOLOGY.is_dir():
        from samecurve.probe import amd

        if devices := amd.devices(environment, TOPOLOGY):
            return Gpus(AMD, devices, amd.hip_variable(environment))
    return Gpus("", (), "")
