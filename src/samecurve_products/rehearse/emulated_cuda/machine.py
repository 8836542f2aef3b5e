"""Which GPUs a child process sees, as the environment variables that carry the choice.

The numbers of a GPU are those that its maker prints and that torch reports for it. The memory of
a device is a limit: nothing is set aside on this machine before a tensor needs it.
"""

import os
from dataclasses import dataclass
from pathlib import Path

MAX_DEVICES = 16
GIB = 1 << 30


@dataclass(frozen=True)
class Gpu:
    """What torch says about one model of GPU.

    memory: bytes that torch reports as total_memory. shared: bytes of shared memory per block.
    gcn_arch: the ROCm name of the architecture; empty for NVIDIA.
    """

    name: str
    capability: tuple[int, int]
    memory: int
    processors: int
    l2_bytes: int
    warp: int = 32
    threads: int = 2048
    shared: int = 49152
    gcn_arch: str = ""


# Sources: NVIDIA's data sheets and tuning guides (processors, L2), AMD's CDNA 3 white paper, and
# the totals that torch prints on such cards, which are a little below the number on the box.
GPUS = {
    "H100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 85_017_493_504, 132, 50 << 20),
    "H200": Gpu("NVIDIA H200", (9, 0), 150_109_880_320, 132, 60 << 20),
    "A100": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 85_097_971_712, 108, 40 << 20),
    "RTX4090": Gpu("NVIDIA GeForce RTX 4090", (8, 9), 25_386_352_640, 128, 72 << 20, threads=1536),
    "T4": Gpu("Tesla T4", (7, 5), 15_828_320_256, 40, 4 << 20, threads=1024),
    "MI300X": Gpu(
        "AMD Instinct MI300X",
        (9, 4),
        206_141_652_992,
        304,
        4 << 20,
        warp=64,
        shared=65536,
        gcn_arch="gfx942:sramecc+:xnack-",
    ),
}


@dataclass(frozen=True)
class Emulation:
    """The emulated GPUs of a child process.

    gpu: a key of GPUS. memory: bytes a device may hold, the GPU's own if None.
    report: a directory in which each process leaves what it found (see report.py).
    loud: findings go to stderr as soon as they are made.
    """

    devices: int = 2
    gpu: str = "H100"
    memory: int | None = None
    report: Path | None = None
    loud: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.devices <= MAX_DEVICES:
            raise ValueError(f"{self.devices} devices: the emulator has 1 to {MAX_DEVICES}")
        if self.gpu not in GPUS:
            raise ValueError(f"no GPU is named {self.gpu!r}: choose one of {', '.join(GPUS)}")
        if self.memory is not None and self.memory < 1:
            raise ValueError(f"a device of {self.memory} bytes holds nothing: give 1 or more")

    def environment(self) -> dict[str, str]:
        """Variables to add to a child's environment; PYTHONPATH is put before what it holds now."""
        start = str(Path(__file__).parent / "start")
        paths = [start, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        chosen = {
            "EMULATED_CUDA": "1",
            "EMULATED_CUDA_DEVICES": str(self.devices),
            "EMULATED_CUDA_GPU": self.gpu,
            "EMULATED_CUDA_BYTES": str(self.memory or GPUS[self.gpu].memory),
            "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        }
        if self.report is not None:
            chosen["EMULATED_CUDA_REPORT"] = str(self.report)
        if self.loud:
            chosen["EMULATED_CUDA_LOUD"] = "1"
        return chosen


def from_environment() -> Emulation:
    """The emulation that this process was started with; ValueError where it is no such thing."""
    report = os.environ.get("EMULATED_CUDA_REPORT")
    memory = os.environ.get("EMULATED_CUDA_BYTES")
    return Emulation(
        devices=int(os.environ.get("EMULATED_CUDA_DEVICES", "2")),
        gpu=os.environ.get("EMULATED_CUDA_GPU", "H100"),
        memory=int(memory) if memory else None,
        report=Path(report) if report else None,
        loud=bool(os.environ.get("EMULATED_CUDA_LOUD")),
    )
