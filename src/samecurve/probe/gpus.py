"""The GPUs of this machine, from NVIDIA or AMD."""

from collections.abc import Mapping
from dataclasses import dataclass

from samecurve.core.planning.machine import Device
from samecurve.probe import amd, nvidia

NVIDIA, AMD = "NVIDIA", "AMD"


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
    if amd_devices := amd.devices(environment):
        return Gpus(AMD, amd_devices, amd.variable(environment))
    return Gpus("", (), "")
