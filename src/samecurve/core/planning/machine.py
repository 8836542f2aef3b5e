"""Machine: the devices, links and cores that plan() chooses from, and the devices that a run uses.

probe/ describes this machine, simulation/cluster.py a machine that the user does not have.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from samecurve.core.planning import Decision
from samecurve.errors import UserError
from samecurve.units import counted

if TYPE_CHECKING:  # `samecurve run` asks what devices there are, and imports no pydantic
    from samecurve.core.config.sections import Config, Devices

Kind = Literal["cpu", "cuda"]
NVIDIA, AMD = "NVIDIA", "AMD"  # vendors of GPUs
# NVIDIA's first GPUs with it: CUDA C++ programming guide, "Compute Capabilities"
_LEAST_CAPABILITY = {"bf16": (8, 0), "float8": (8, 9)}
MOST_CPU_RANKS = 256


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
        """Dense FLOP/s at this precision, None where no data sheet is on file (no CPU's is)."""
        if self.kind == "cpu":
            return None
        from samecurve.core.planning.hardware import peak

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
    threads: int | None = None  # of a process, as OMP_NUM_THREADS asks for; None: it does not
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


GROWING = {"auto", "ddp", "fsdp"}  # strategies that take any number of processes
DevicesDecision = Decision[tuple[Device, ...]]


def choose_devices(section: "Devices", engine: str, machine: Machine) -> DevicesDecision:
    """The devices of every host; several hosts are assumed to be alike.

    UserError: there are no such devices, or the installed engine can't use them.
    """
    chosen = _choose_on_this_host(section.use.strip(), engine, machine)
    on_cpu = chosen.value[0].kind == "cpu"
    unfit = machine.unfit.get(engine)
    if unfit and not on_cpu:
        gpus = f"{counted(len(chosen.value), 'GPU')} ({chosen.value[0].name})"
        raise UserError(
            f"{gpus} for engine {engine}, and {unfit.cause}",
            f"{unfit.remedy}; or --devices cpu",
            "devices.use",
        )
    warnings: tuple[str, ...] = ()
    count, used = machine.xla_devices, len(chosen.value)
    if engine == "jax" and on_cpu and count not in {None, used}:
        warning = (
            f"XLA_FLAGS asks for {counted(count or 0, 'CPU device')}, and devices {section.use}"
            f" for {used}: {used} are used (--devices cpu:{count} for the others)"
        )
        warnings = (warning,)
    reason = chosen.reasons["devices"]
    if machine.hosts > 1:
        reason += f"; on each of {machine.hosts} hosts, taken to be like this one"
    return Decision(chosen.value * machine.hosts, {"devices": reason}, warnings)


def _choose_on_this_host(use: str, engine: str, machine: Machine) -> DevicesDecision:
    gpus = machine.devices
    cpus = re.fullmatch(r"cpu(?::(\d+))?", use)
    if cpus:
        unit = "rank" if engine == "torch" else "device"
        count = int(cpus.group(1) or 1)
        cores = counted(machine.cores, "core")
        reason = f"{use}: {counted(count, f'CPU {unit}')} on {cores}"
        return _cpu_ranks(use, count, machine, reason)
    if use == "auto" and not gpus and engine == "jax" and machine.xla_devices:
        count = machine.xla_devices
        reason = f"no GPU found; XLA_FLAGS asks for {counted(count, 'CPU device')}"
        return _cpu_ranks(use, count, machine, reason)
    if use == "auto" and not gpus:
        return _cpu_ranks(use, 1, machine, "no GPU found; --devices cpu:2 for more ranks")
    if use not in {"auto", "all"}:
        return _choose_by_index(use, gpus)
    if not gpus:
        raise UserError(
            "no GPU found",
            "--devices cpu, or cpu:4 for four ranks; `nvidia-smi` or `rocm-smi` shows whether the"
            " driver sees one",
            "devices.use",
        )
    return Decision(gpus, {"devices": f"{len(gpus)} of {len(gpus)} visible devices"})


def _cpu_ranks(use: str, count: int, machine: Machine, reason: str) -> DevicesDecision:
    """UserError: the number of CPU ranks is out of range."""
    if not 1 <= count <= MOST_CPU_RANKS:
        raise UserError(
            f"{use}: {count} CPU ranks", f"between 1 and {MOST_CPU_RANKS}", "devices.use"
        )
    return Decision(machine.ranks_on_cpu(count), {"devices": reason})


def _choose_by_index(use: str, gpus: tuple[Device, ...]) -> DevicesDecision:
    here = f"here: {', '.join(f'{gpu.index} ({gpu.name})' for gpu in gpus)}"
    if not gpus:
        here = "there is no GPU here; --devices cpu:2 runs two CPU ranks"
    if not re.fullmatch(r"\d+(\s*,\s*\d+)*", use):
        raise UserError(
            f"devices {use!r} is neither auto, all, cpu, cpu:N nor a list of indices",
            f"for example --gpus 0,1; {here}",
            "devices.use",
        )
    wanted = [int(part) for part in use.split(",")]
    by_index = {gpu.index: gpu for gpu in gpus}
    missing = [str(index) for index in wanted if index not in by_index]
    if missing:
        verb = "does" if len(missing) == 1 else "do"
        raise UserError(f"GPU {', '.join(missing)} {verb} not exist", here, "devices.use")
    if len(set(wanted)) < len(wanted):
        raise UserError(f"devices {use} names a GPU twice", "each one once", "devices.use")
    reason = f"{len(wanted)} of {len(gpus)} visible devices, as asked"
    return Decision(tuple(by_index[index] for index in wanted), {"devices": reason})


def peak_flops(devices: tuple[Device, ...], precision: str) -> float | None:
    """FLOP/s of all devices together; None: a device is not on file."""
    peaks = [device.peak(precision) for device in devices]
    known = [peak for peak in peaks if peak]
    return sum(known) if len(known) == len(peaks) else None


def has_open_ranks(config: "Config", machine: Machine) -> bool:
    """Whether the number of CPU ranks is the plan's choice: there is no GPU, and neither the config
    nor a launcher says how many.
    """
    alone = machine.hosts == machine.started == 1 and not machine.devices
    section = config.devices
    is_open = section.use.strip() == "auto" and not config.fixes_devices
    return alone and is_open and config.engine == "torch" and section.strategy in GROWING
