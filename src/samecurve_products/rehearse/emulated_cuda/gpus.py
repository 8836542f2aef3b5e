"""The state of the emulated GPUs, as a driver's library tells it. torch is not imported.

The processes of an emulated machine share the directory EMULATED_CUDA_STATE, if there is one:
gpus.json holds the faults that somebody gives to GPUs (write_faults), and <process id>.json the
memory that a process holds on each GPU (write_held). Both are read anew at each question, so that
a fault can begin in the middle of a run.
"""

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from uuid import UUID

from samecurve_products.rehearse.emulated_cuda.machine import GPUS, Gpu

STATE = "EMULATED_CUDA_STATE"
NVIDIA, AMD = "NVIDIA", "AMD"
DRIVER = {NVIDIA: "580.95.05", AMD: "6.14.14"}
CUDA = "13.0"  # which the driver can run, and for which torch says that it was built
HIP = "7.0.51831"
NVLINKS = {"NVIDIA H100 80GB HBM3": 18, "NVIDIA H200": 18, "NVIDIA A100-SXM4-80GB": 12}
WITHOUT_ECC = {"NVIDIA GeForce RTX 4090"}
_CONTEXT = 512 << 20  # bytes that a process takes on a GPU beside its tensors
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True)
class GpuFaults:
    """What is wrong with one GPU. The defaults are those of a sound GPU."""

    lost: bool = False  # it has fallen off the bus
    uncorrected_errors: int = 0  # of its memory, since the driver was loaded
    celsius: int = 41
    slowdowns: int = 0  # bits, as NVML has them: why the clock is held down
    used_by_others: int = 0  # bytes that processes outside of the emulator hold


@dataclass(frozen=True)
class GpuUse:
    """A process that uses a GPU."""

    pid: int
    memory: int  # bytes


@dataclass(frozen=True)
class Machine:
    """The emulated GPUs of one vendor, as an environment describes them."""

    gpus: tuple[Gpu, ...]
    state: Path | None  # the directory that the processes share

    def faults(self, index: int) -> GpuFaults:
        """What is wrong with a GPU now."""
        return read_faults(self.state).get(index, GpuFaults()) if self.state else GpuFaults()

    def uses(self, index: int) -> list[GpuUse]:
        """The living processes that hold memory of a GPU now."""
        held = _read_held(self.state) if self.state else {}
        return [GpuUse(pid, gpus[index]) for pid, gpus in held.items() if index in gpus]

    def used(self, index: int) -> int:
        """Bytes of a GPU's memory that are taken now."""
        taken = sum(use.memory for use in self.uses(index)) + self.faults(index).used_by_others
        return min(taken, self.gpus[index].memory)


def emulated_machine(environment: Mapping[str, str], vendor: str) -> Machine:
    """The GPUs of this vendor; none where none of this vendor are emulated.

    ValueError: the environment names a GPU that the emulator does not know.
    """
    state = environment.get(STATE)
    shared = Path(state) if state else None
    if environment.get("EMULATED_CUDA") != "1":
        return Machine((), shared)
    key = environment.get("EMULATED_CUDA_GPU", "H100")
    if key not in GPUS:
        raise ValueError(f"EMULATED_CUDA_GPU={key} is none of {', '.join(GPUS)}")
    gpu = GPUS[key]
    if vendor != (AMD if gpu.gcn_arch else NVIDIA):
        return Machine((), shared)
    gpu = replace(gpu, memory=int(environment.get("EMULATED_CUDA_BYTES", gpu.memory)))
    return Machine((gpu,) * int(environment.get("EMULATED_CUDA_DEVICES", "2")), shared)


def unique_id(index: int) -> int:
    """A number for a GPU that no other one has, of 64 bits."""
    return 0xE3C0_DA00_0000_0000 + index


def uuid_of(index: int, vendor: str) -> UUID:
    """The id of a GPU as torch tells it."""
    if vendor == AMD:  # HIP puts the letters of the number there
        return UUID(bytes=f"{unique_id(index):016x}".encode())
    return UUID(int=(index + 1 << 120) + unique_id(index))


def id_of(index: int, vendor: str) -> str:
    """The id of a GPU as its driver tells it, and as a variable may name it."""
    if vendor == AMD:
        return f"GPU-{unique_id(index):016x}"
    return f"GPU-{uuid_of(index, vendor)}"


def bus_address(index: int) -> str:
    """Where a GPU is plugged in: 0000:3b:00.0."""
    return f"0000:{0x3B + index:02x}:00.0"


def write_faults(state: Path, faults: Mapping[int, GpuFaults]) -> None:
    """Give faults to GPUs from now on. state: the directory in EMULATED_CUDA_STATE"""
    text = json.dumps({index: asdict(fault) for index, fault in faults.items()})
    _replace(state / "gpus.json", text)


def read_faults(state: Path) -> dict[int, GpuFaults]:
    """The faults of GPUs; those that are left out are sound."""
    try:
        values = json.loads((state / "gpus.json").read_text())
    except FileNotFoundError:
        return {}
    return {int(index): GpuFaults(**fault) for index, fault in values.items()}


def write_held(state: Path, bytes_by_gpu: Mapping[int, int]) -> None:
    """Say what memory this process holds on each GPU on which it has a context.

    bytes_by_gpu: of its tensors; the driver shows the context of CUDA beside them.
    """
    held = {index: count + _CONTEXT for index, count in bytes_by_gpu.items()}
    _replace(state / f"{os.getpid()}.json", json.dumps(held))


class Utilisation:
    """How busy the processes of a GPU are: the processor time that they take, at most one core."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[float, float]] = {}  # GPU -> (clock, processor seconds)

    def read(self, machine: Machine, index: int) -> float:
        """The share of the time since the last question in which a GPU was busy; 0.0 at first."""
        now = time.monotonic()
        spent = sum(_processor_seconds(use.pid) for use in machine.uses(index))
        before, spent_before = self._last.get(index, (now, spent))
        self._last[index] = now, spent
        if now == before:
            return 0.0
        return min(1.0, max(0.0, (spent - spent_before) / (now - before)))


def _read_held(state: Path) -> dict[int, dict[int, int]]:
    """Process id -> GPU -> bytes, of living processes."""
    held = {}
    for file in state.glob("[0-9]*.json"):
        if Path("/proc", file.stem).exists():
            with suppress(FileNotFoundError):
                values = json.loads(file.read_text())
                held[int(file.stem)] = {int(gpu): int(count) for gpu, count in values.items()}
    return held


def _processor_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # the process has just ended
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _replace(file: Path, text: str) -> None:
    """Write a file so that a reader finds the old text or the new one."""
    fresh = file.with_name(f".{file.name}.{os.getpid()}")
    fresh.write_text(text)
    fresh.replace(file)
