"""How many processes `samecurve run` starts, on which devices, and what they find in their
environment. Says why, in lines for the user.
"""

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

from samecurve.core.planning.machine import Device
from samecurve.errors import UserError
from samecurve.probe import amd, cpu, nvidia
from samecurve.units import show_bytes
from samecurve.worker.cluster_env import explicit

_CUDA, _AMD = "NVIDIA", "AMD"
_OTHERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # mpirun's
_ALLOCATOR = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
)  # one setting, by its names


@dataclass(frozen=True)
class Found:
    """The GPUs that this process may use. variable: which chooses among them."""

    vendor: str
    devices: tuple[Device, ...]
    variable: str


@dataclass(frozen=True)
class Layout:
    """processes: to start.

    visible: the value of found.variable, if --gpus sets it. devices: those that the processes may
    use. why: a line that says it.
    """

    processes: int
    found: Found
    devices: tuple[Device, ...]
    visible: str | None
    why: str


def find(environment: Mapping[str, str]) -> Found:
    """NVIDIA's, else AMD's, else none. UserError: a variable names a GPU that isn't there."""
    if devices := nvidia.devices(environment):
        return Found(_CUDA, devices, nvidia.VISIBLE)
    if amd_devices := amd.devices(environment):
        return Found(_AMD, amd_devices, amd.variable(environment))
    return Found("", (), "")


def refuse_nested(environment: Mapping[str, str]) -> None:
    """UserError: this process is one of several already."""
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    by = (
        "torchrun (or samecurve run)"
        if "TORCHELASTIC_RUN_ID" in environment
        else "srun"
        if tasks.isdigit() and int(tasks) > 1
        else None
    )
    by = by or next(("mpirun" for name in _OTHERS if environment.get(name, "1") != "1"), None)
    if by:
        raise UserError(
            f"started by {by} as one of several processes, and would start ranks itself",
            f"one of the two: give the script itself to {by.split()[0]}, or leave"
            f" {by.split()[0]} out",
            "environment",
        )
    stale = [name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if name in environment]
    if stale:
        raise UserError(
            f"{', '.join(f'{name}={environment[name]}' for name in stale)} is set already, as for"
            " one of several ranks",
            f"unset {' '.join(stale)}: samecurve run sets them for each rank",
            "environment",
        )


def lay_out(found: Found, gpus: str | None, nproc: int | None, jax: bool) -> Layout:
    """UserError: what is asked for is not there, or contradicts itself."""
    if gpus is not None and nproc is not None:
        remedy = (
            f"--gpus {gpus} starts one on each; {found.variable or nvidia.VISIBLE}={gpus} samecurve"
            f" run --nproc {nproc} starts {nproc} that see them all"
        )
        raise UserError(
            f"--gpus {gpus} and --nproc {nproc} both say how many processes", remedy, "--gpus"
        )
    if nproc is not None and nproc < 1:
        raise UserError(
            f"--nproc {nproc} starts no process",
            "a number of processes from 1; leave it out for one on each GPU",
            "--nproc",
        )
    chosen = _chosen(found, gpus) if gpus is not None else list(range(len(found.devices)))
    devices, visible = tuple(found.devices[index] for index in chosen), None
    if gpus is not None:
        given = [
            entry.strip()
            for entry in os.environ.get(found.variable, "").split(",")
            if entry.strip()
        ] or [str(index) for index in range(len(found.devices))]
        visible = ",".join(given[index] for index in chosen)
    if not devices:
        count = nproc or 1
        return Layout(
            count,
            found,
            (),
            None,
            f"{_ranks(count)} on the CPU: no GPU found{'' if nproc else '; --nproc N starts N'}",
        )
    if nproc is not None and nproc > len(devices):
        raise UserError(
            f"--nproc {nproc} on {len(devices)} GPU{'s' if len(devices) > 1 else ''}: NCCL refuses"
            " two ranks on one GPU",
            f"--nproc {len(devices)} or less; {found.variable}= samecurve run --nproc {nproc} hides"
            " the GPUs, for ranks on the CPU",
            "--nproc",
        )
    count = nproc or (1 if jax else len(devices))
    shown = f"{_named(devices)}{f', of {len(found.devices)} visible' if len(devices) < len(found.devices) else ''}"
    if count == len(devices):
        return Layout(
            count,
            found,
            devices,
            visible,
            f"{_ranks(count)}, one for each of {shown}" if count > 1 else f"1 rank on {shown}",
        )
    if count == 1 and nproc is None:
        return Layout(
            1,
            found,
            devices,
            visible,
            f"1 rank with all of {shown}: the script imports jax, which drives all devices from one"
            " process; --nproc N starts N",
        )
    rest = len(devices) - count
    return Layout(
        count,
        found,
        devices,
        visible,
        f"{_ranks(count)} for {shown}: if each takes one, {rest} stay{'s' if rest == 1 else ''}"
        " idle; without --nproc one rank is started for each",
    )


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count > 1 else ''}"


def _named(devices: tuple[Device, ...]) -> str:
    kinds = dict.fromkeys((device.name, device.memory) for device in devices)
    return ", ".join(
        f"{sum((device.name, device.memory) == kind for device in devices)} x {kind[0]}"
        f" ({show_bytes(kind[1])})"
        for kind in kinds
    )


def _chosen(found: Found, gpus: str) -> list[int]:
    entries = [entry.strip() for entry in gpus.split(",") if entry.strip()]
    there = (
        "this machine has"
        f" {', '.join(str(device.index) for device in found.devices)}{f' under {found.variable}' if os.environ.get(found.variable) else ''}"
        if found.devices
        else "no GPU was found"
    )
    if not entries:
        raise UserError(f"--gpus '{gpus}' names no GPU", "--gpus 0,1", "--gpus")
    for entry in entries:
        if not entry.isdigit() or int(entry) >= len(found.devices):
            raise UserError(
                f"--gpus {gpus}: GPU {entry} does not exist; {there}",
                (
                    "name those that are there"
                    if found.devices
                    else "--nproc N starts N ranks on the CPU"
                ),
                "--gpus",
            )
    if len(set(entries)) < len(entries):
        raise UserError(
            f"--gpus {gpus} names a GPU twice",
            "each once: NCCL refuses two ranks on one GPU",
            "--gpus",
        )
    return [int(entry) for entry in entries]


def settings(layout: Layout, environment: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """What all ranks get beside this process's own environment, and what is kept as the user set
    it.
    """
    wanted = {
        "PYTHONUNBUFFERED": "1",
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": str(max(1, cpu.cores() // layout.processes)),
    }
    if layout.found.vendor:
        wanted |= {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    if layout.found.vendor == _CUDA:
        wanted |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", _allocator(): "expandable_segments:True"}
    if layout.found.vendor == _AMD:
        wanted |= {
            "HSA_NO_SCRATCH_RECLAIM": "1",
            "HSA_ENABLE_SDMA": "1",
            "HSA_FORCE_FINE_GRAIN_PCIE": "1",
        }
    kept = {name: environment[name] for name in wanted if name in environment}
    if other := [
        name for name in _ALLOCATOR if name in environment and layout.found.vendor == _CUDA
    ]:
        kept |= {name: environment[name] for name in other}
        wanted = {name: value for name, value in wanted.items() if name not in _ALLOCATOR}
    added = {name: value for name, value in wanted.items() if name not in kept}
    if layout.visible is not None:
        added[layout.found.variable] = layout.visible
    return added, [f"{name}={value}" for name, value in kept.items()]


def _allocator() -> str:
    """torch knows the new name since 2.9, and warns of the old one there; before, only the old one
    is read.
    """
    try:
        major, minor = metadata.version("torch").split(".")[:2]
    except metadata.PackageNotFoundError:
        return "PYTORCH_ALLOC_CONF"
    return "PYTORCH_ALLOC_CONF" if (int(major), int(minor)) >= (2, 9) else "PYTORCH_CUDA_ALLOC_CONF"


def seats(processes: int, port: int, restarts: int, most: int) -> list[dict[str, str]]:
    """What tells each rank who it is: what torchrun sets, since Lightning and torch look for more
    than the rank.
    """
    world = {
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": str(processes),
        "TORCHELASTIC_RUN_ID": f"samecurve-{os.getpid()}",
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(most),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    return [
        {
            **explicit(rank, processes, rank, processes, "127.0.0.1", port),
            "ROLE_RANK": str(rank),
            **world,
        }
        for rank in range(processes)
    ]


def reserve() -> socket.socket:
    """A free port, held without listening as long as the socket is open: the system gives it to
    nobody else, and the first rank's store, which reuses addresses as this does, listens on it.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


if __name__ == "__main__":  # for scripts/run_*_all.sh
    try:
        print(find(os.environ).vendor)
    except UserError as error:
        sys.exit(f"error: {error}")
