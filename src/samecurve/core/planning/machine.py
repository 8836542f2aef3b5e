"""Machine: the devices, links and cores that plan() chooses from.

probe/ describes this machine, simulation/cluster.py a machine that the user does not have.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from samecurve.core.planning.hardware import peak

Kind = Literal["cpu", "cuda"]
# NVIDIA's first GPUs with it: CUDA C++ programming guide, "Compute Capabilities"
_LEAST_CAPABILITY = {"bf16": (8, 0), "float8": (8, 9)}


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device: a GPU or a CPU rank."""

    kind: Kind
    index: int  # as the program sees it (CUDA_VISIBLE_DEVICES applied)
    name: str
    memory: int  # bytes
    driver: str = ""  # version; '': not known
    capability: str = ""  # NVIDIA's compute capability, as "8.0"; '': not known

    @property
    def place(self) -> str:
        """Torch's name of the device: 'cpu', 'cuda:2'."""
        return "cpu" if self.kind == "cpu" else f"{self.kind}:{self.index}"

    def peak(self, precision: str) -> float | None:
        """Dense FLOP/s at this precision, None where no data sheet is on file."""
        return peak(self.name, precision)

    def lacks(self, precision: str) -> bool:
        """Whether the device is known to lack this precision (bf16, float8)."""
        if self.capability and precision in _LEAST_CAPABILITY:
            major, _, minor = self.capability.partition(".")
            return (int(major), int(minor)) < _LEAST_CAPABILITY[precision]
        return precision == "bf16" and self.peak("f16") is not None and self.peak("bf16") is None


@dataclass(frozen=True, kw_only=True)
class Link:
    """A path between two devices."""

    first: int
    second: int
    kind: str  # nvlink, pcie, host
    bandwidth: float | None = None  # bytes per second one way; None: not known


@dataclass(frozen=True)
class UnfitEngine:
    """Why an installed engine can't use this machine's GPUs, and how to repair that."""

    cause: str
    remedy: str


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The resources that this process may use."""

    devices: tuple[Device, ...]  # GPUs; empty without any
    links: tuple[Link, ...]
    host_bytes: int  # that this process may use, limits applied
    cores: int  # that this process may use
    cpu: str = "CPU"
    started: int = 1  # processes that torchrun, Slurm or the user started already
    hosts: int = 1  # on which they run, all like this one
    xla_devices: int | None = None  # CPU devices that XLA_FLAGS asks for
    unfit: Mapping[str, UnfitEngine] = field(default_factory=dict)  # by engine

    def ranks_on_cpu(self, count: int) -> tuple[Device, ...]:
        """CPU ranks, each with its share of the host's memory."""
        memory = self.host_bytes // count
        return tuple(
            Device(kind="cpu", index=index, name=self.cpu, memory=memory) for index in range(count)
        )
