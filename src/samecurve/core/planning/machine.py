"""What a machine has: the input of plan(), written by probe/, or by hand for a machine one doesn't
have.
"""

from dataclasses import dataclass
from typing import Literal

from samecurve.core.simulation.hardware import peak

Kind = Literal["cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device.

    index: as the program sees it (CUDA_VISIBLE_DEVICES applied). memory: bytes. driver: version or
    ''.
    """

    kind: Kind
    index: int
    name: str
    memory: int
    driver: str = ""

    @property
    def place(self) -> str:
        """The name torch gives it: 'cpu', 'cuda:2'."""
        return "cpu" if self.kind == "cpu" else f"{self.kind}:{self.index}"

    def peak(self, precision: str) -> float | None:
        """Dense FLOP/s at this precision, None where no data sheet is on file."""
        return peak(self.name, precision)


@dataclass(frozen=True, kw_only=True)
class Link:
    """A path between two devices.

    kind: nvlink, pcie, host. bandwidth: bytes per second one way, None unknown.
    """

    first: int
    second: int
    kind: str
    bandwidth: float | None = None


@dataclass(frozen=True, kw_only=True)
class Machine:
    """devices: GPUs, none on a machine without.

    host_bytes, cores: what this process may use, limits applied.

    started, hosts: processes that torchrun, Slurm or the user started already, and on how many
    hosts like this one.
    """

    devices: tuple[Device, ...]
    links: tuple[Link, ...]
    host_bytes: int
    cores: int
    cpu: str = "CPU"
    started: int = 1
    hosts: int = 1

    def ranks_on_cpu(self, count: int) -> tuple[Device, ...]:
        """Host memory and cores shared out to `count` CPU ranks."""
        return tuple(
            Device(kind="cpu", index=index, name=self.cpu, memory=self.host_bytes // count)
            for index in range(count)
        )
