"""What a machine has: the input of plan(), written by probe/, or by hand for a machine one doesn't have."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["cpu", "cuda"]

# Dense peak in FLOP/s by part of the device's name. Sources: NVIDIA data sheets of each product (SXM where there are several; without sparsity).
_PEAKS: dict[str, dict[str, float]] = {
    "H200": {"bf16": 989e12, "f16": 989e12, "f32": 67e12, "f64": 34e12},
    "H100 PCIe": {"bf16": 756e12, "f16": 756e12, "f32": 51e12, "f64": 26e12},
    "H100": {"bf16": 989e12, "f16": 989e12, "f32": 67e12, "f64": 34e12},
    "A100": {"bf16": 312e12, "f16": 312e12, "f32": 19.5e12, "f64": 9.7e12},
    "L40S": {"bf16": 362e12, "f16": 362e12, "f32": 91.6e12},
    "RTX 4090": {"bf16": 165e12, "f16": 165e12, "f32": 82.6e12},
    "RTX 3090": {"bf16": 71e12, "f16": 71e12, "f32": 35.6e12},
    "V100": {"f16": 125e12, "f32": 15.7e12, "f64": 7.8e12},
}


@dataclass(frozen=True)
class Device:
    """One device. index: as the program sees it (CUDA_VISIBLE_DEVICES applied). memory: bytes. driver: version or ''."""

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
        for part, peaks in _PEAKS.items():
            if part in self.name:
                return peaks.get(precision)
        return None


@dataclass(frozen=True)
class Link:
    """A path between two devices. kind: nvlink, pcie, host. bandwidth: bytes per second one way, None unknown."""

    first: int
    second: int
    kind: str
    bandwidth: float | None = None


@dataclass(frozen=True)
class Machine:
    """devices: GPUs, none on a machine without. host_bytes, cores: what this process may use, limits applied.

    started, hosts: processes that torchrun, Slurm or the user started already, and on how many hosts like this one.
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
        return tuple(Device("cpu", index, self.cpu, self.host_bytes // count) for index in range(count))
