"""The GPUs of this machine, from NVIDIA (nvidia.py) or AMD (amd.py)."""

from collections.abc import Mapping
from dataclasses import dataclass

from samecurve.core.planning.machine import Device
from samecurve.probe import amd, nvidia
from samecurve.probe.gpu_state import GpuState

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
    if devices := amd.devices(environment):
        return Gpus(AMD, devices, amd.hip_variable(environment))
    return Gpus("", (), "")


def gpu_states(vendor: str, environment: Mapping[str, str]) -> list[GpuState]:
    """The state of each of find_gpus(), in its order. vendor: as Gpus has it."""
    if vendor == NVIDIA:
        return nvidia.states(environment)
    return amd.states(environment) if vendor == AMD else []


def visibility_variables(vendor: str) -> tuple[str, ...]:
    """The environment variables that hide GPUs. vendor: '': of all vendors."""
    variables = {NVIDIA: (nvidia.VISIBLE,), AMD: (*amd.VARIABLES, nvidia.VISIBLE)}
    return variables.get(vendor, (nvidia.VISIBLE, *amd.VARIABLES))
