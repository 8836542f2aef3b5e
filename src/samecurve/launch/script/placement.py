"""The number of processes that `samecurve run` starts, their devices and their environment.

Each choice has its reason, in a line for the user.
"""

import os
import socket
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from samecurve.core.planning.machine import Device
from samecurve.errors import UserError
from samecurve.launch.gpu_settings import gpu_settings, user_settings, without_user_settings
from samecurve.probe import Gpus, cpu_cores, find_gpus, nvidia
from samecurve.units import counted, show_bytes
from samecurve.worker import local_environment

_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # mpirun's


@dataclass(frozen=True)
class Placement:
    """The processes to start, and their devices."""

    processes: int  # how many to start
    gpus: Gpus
    devices: tuple[Device, ...]  # the devices that the processes may use
    visible: str | None  # the value of gpus.variable, if --gpus sets it
    why: str  # the reason, in a line


def refuse_nested(environment: Mapping[str, str]) -> None:
    """Refuse to start ranks in a rank. UserError: this process is one of several already."""
    if launcher := _launcher(environment):
        program = launcher.split()[0]
        raise UserError(
            f"started by {launcher} as one of several processes, and would start ranks itself",
            f"one of the two: give the script itself to {program}, or leave {program} out",
            "environment",
        )
    stale = [name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if name in environment]
    if stale:
        values = ", ".join(f"{name}={environment[name]}" for name in stale)
        raise UserError(
            f"{values} is set already, as for one of several ranks",
            f"unset {' '.join(stale)}: samecurve run sets them for each rank",
            "environment",
        )


def _launcher(environment: Mapping[str, str]) -> str | None:
    """The program that started this process as one of several; None: there is none."""
    if "TORCHELASTIC_RUN_ID" in environment:
        return "torchrun (or samecurve run)"
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks.isdigit() and int(tasks) > 1:
        return "srun"
    if any(environment.get(name, "1") != "1" for name in _MPI_SIZES):
        return "mpirun"
    return None


def lay_out(gpus_found: Gpus, *, gpus: str | None, nproc: int | None, jax: bool) -> Placement:
    """Choose the processes and their devices.

    gpus, nproc: the options.
    jax: the script drives all devices from one process.

    UserError: the options name devices that are not there, or contradict each other.
    """
    _check_request(gpus_found, gpus, nproc)
    indices = list(range(len(gpus_found.devices)))
    visible = None
    if gpus is not None:
        indices = _parse_gpus(gpus_found, gpus)
        visible = _visible_devices(gpus_found, indices)
    devices = tuple(gpus_found.devices[index] for index in indices)
    if not devices:
        count = nproc or 1
        hint = "" if nproc else "; --nproc N starts N"
        why = f"{counted(count, 'rank')} on the CPU: no GPU found{hint}"
        return Placement(count, gpus_found, (), None, why)
    if nproc is not None and nproc > len(devices):
        raise UserError(
            f"--nproc {nproc} on {counted(len(devices), 'GPU')}: NCCL refuses two ranks on one GPU",
            f"--nproc {len(devices)} or less; {gpus_found.variable}= samecurve run --nproc {nproc}"
            " hides the GPUs, for ranks on the CPU",
            "--nproc",
        )
    count = nproc or (1 if jax else len(devices))
    shown = _describe(devices)
    if len(devices) < len(gpus_found.devices):
        shown += f", of {len(gpus_found.devices)} visible"
    unused = len(devices) - count
    if unused == 0 and count == 1:
        why = f"1 rank on {shown}"
    elif unused == 0:
        why = f"{counted(count, 'rank')}, one for each of {shown}"
    elif nproc is None:
        why = (
            f"1 rank with all of {shown}: the script imports jax, which drives all devices from one"
            " process; --nproc N starts N"
        )
    else:
        stay = "stays" if unused == 1 else "stay"
        why = (
            f"{counted(count, 'rank')} for {shown}: if each takes one, {unused} {stay} idle;"
            " without --nproc one rank is started for each"
        )
    return Placement(count, gpus_found, devices, visible, why)


def _check_request(gpus_found: Gpus, gpus: str | None, nproc: int | None) -> None:
    if gpus is not None and nproc is not None:
        variable = gpus_found.variable or nvidia.VISIBLE
        raise UserError(
            f"--gpus {gpus} and --nproc {nproc} both say how many processes",
            f"--gpus {gpus} starts one on each; {variable}={gpus} samecurve run --nproc {nproc}"
            f" starts {nproc} that see them all",
            "--gpus",
        )
    if nproc is not None and nproc < 1:
        raise UserError(
            f"--nproc {nproc} starts no process",
            "a number of processes from 1; leave it out for one on each GPU",
            "--nproc",
        )


def _visible_devices(gpus: Gpus, indices: list[int]) -> str:
    """The variable's value that makes only these GPUs visible."""
    entries = [entry.strip() for entry in os.environ.get(gpus.variable, "").split(",")]
    names = [entry for entry in entries if entry]
    if not names:
        return ",".join(map(str, indices))
    return ",".join(names[index] for index in indices)


def _describe(devices: tuple[Device, ...]) -> str:
    kinds = Counter((device.name, device.memory) for device in devices)
    return ", ".join(
        f"{count} x {name} ({show_bytes(memory)})" for (name, memory), count in kinds.items()
    )


def _parse_gpus(gpus: Gpus, text: str) -> list[int]:
    """The indices of the GPUs that --gpus names."""
    entries = [entry.strip() for entry in text.split(",") if entry.strip()]
    if not entries:
        raise UserError(f"--gpus '{text}' names no GPU", "--gpus 0,1", "--gpus")
    for entry in entries:
        if not entry.isdigit() or int(entry) >= len(gpus.devices):
            raise _no_such_gpu(gpus, text, entry)
    if len(set(entries)) < len(entries):
        raise UserError(
            f"--gpus {text} names a GPU twice",
            "each once: NCCL refuses two ranks on one GPU",
            "--gpus",
        )
    return [int(entry) for entry in entries]


def _no_such_gpu(gpus: Gpus, text: str, entry: str) -> UserError:
    if not gpus.devices:
        there, remedy = "no GPU was found", "--nproc N starts N ranks on the CPU"
    else:
        there = f"this machine has {', '.join(str(device.index) for device in gpus.devices)}"
        remedy = "name those that are there"
        if os.environ.get(gpus.variable):
            there += f" under {gpus.variable}"
    return UserError(f"--gpus {text}: GPU {entry} does not exist; {there}", remedy, "--gpus")


def settings(
    placement: Placement, environment: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """The variables to add for all ranks, and those that the user has set already."""
    wanted = {
        "PYTHONUNBUFFERED": "1",
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": str(max(1, cpu_cores() // placement.processes)),
        **gpu_settings(placement.gpus.vendor),
    }
    kept = user_settings(wanted, environment)
    added = without_user_settings(wanted, environment)
    if placement.visible is not None:
        added[placement.gpus.variable] = placement.visible
    return added, [f"{name}={value}" for name, value in kept.items()]


def rank_environments(
    world_size: int, port: int, *, restart: int, max_restarts: int
) -> list[dict[str, str]]:
    """The variables that tell each rank who it is.

    They are all that torchrun sets, since Lightning and torch read more than the rank.
    """
    group = {
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": str(world_size),
        "TORCHELASTIC_RUN_ID": f"samecurve-{os.getpid()}",
        "TORCHELASTIC_RESTART_COUNT": str(restart),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    return [
        {**local_environment(rank, world_size, port), "ROLE_RANK": str(rank), **group}
        for rank in range(world_size)
    ]


@contextmanager
def hold_port(port: int = 0) -> Iterator[int]:
    """The port where ranks meet, held while the block runs. port: 0: any free port."""
    if port:
        yield port
        return
    with reserve_port() as holder:
        yield int(holder.getsockname()[1])


def reserve_port() -> socket.socket:
    """Hold a free port as long as the socket is open, without listening on it.

    The system gives the port to no other process. The first rank's store can listen on it, since
    both reuse addresses.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    return holder


if __name__ == "__main__":  # for scripts/run_*_all.sh
    try:
        print(find_gpus(os.environ).vendor)
    except UserError as error:
        sys.exit(f"error: {error}")
