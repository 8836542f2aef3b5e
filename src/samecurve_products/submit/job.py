"""A job: the command of a run, and the machines that it asks a queue for.

The plan of the run is made for these machines first, so that a config that can't run there is
refused before it waits in a queue.
"""

import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from samecurve.core.planning.hardware import device_spec
from samecurve.core.planning.planner import plan
from samecurve.seam import (
    Config,
    LoadedConfig,
    Machine,
    Plan,
    UserError,
    counted,
    describe,
    probe,
    python_module,
)
from samecurve_products.lab.simulation.cluster import read_cluster

AGAIN = 143  # exit code of a run that SIGTERM has ended, after saving
NEVER = 2  # exit code of a command or config that can't be honoured
PORT = 29500  # where the machines of a job meet, on the first of them
LEAVE_MARGIN = 10  # seconds of the grace period that are left to the engine itself
_GPU = "--gpu-type"


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The machines that a job asks for, all alike."""

    count: int
    gpus: int  # on each; 0: the job trains on CPUs
    gpu_type: str = ""  # '': not known

    def __str__(self) -> str:
        each = counted(self.gpus, self.gpu_type or "GPU") if self.gpus else "no GPU"
        return f"{counted(self.count, 'machine')} with {each}{' each' if self.count > 1 else ''}"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run that an engine starts on its machines."""

    name: str
    words: tuple[str, ...]  # of `samecurve train`, as they were typed, and --save-dir
    run: Path
    directory: Path  # where the command is run: FILE and the run are seen from there
    nodes: Nodes
    ranks_per_node: int
    engine: str
    restarts: int  # after a failure, without a step saved in between
    save_seconds: int  # from the request to stop to the end

    @property
    def num_ranks(self) -> int:
        return self.nodes.count * self.ranks_per_node

    @property
    def leave_seconds(self) -> int:
        """Seconds in which a rank that was asked to stop may end its step and save."""
        return max(1, self.save_seconds - LEAVE_MARGIN)

    def command(self, python: str) -> list[str]:
        """The command of one rank, or of one machine."""
        return python_module("samecurve", "train", *self.words, python=python)

    def shell_command(self, python: str) -> str:
        return shlex.join(self.command(python))


def checked_name(text: str) -> str:
    """A name that every engine takes: lower-case letters, digits and dashes, at most 40."""
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-")
    return plain if plain[:1].isalpha() else f"run-{plain}".rstrip("-")


def devices_per_node(config: Config, nodes: Nodes) -> int:
    """Devices of a machine that the config uses. UserError: others than the job asks for."""
    use = config.devices.use.strip()
    cpus = re.fullmatch(r"cpu(?::(\d+))?", use)
    if cpus and nodes.gpus:
        raise UserError(
            f"the config trains on CPUs (devices.use {use}), and the job asks for"
            f" {counted(nodes.gpus, 'GPU')} on each machine",
            "--devices auto, or a job without GPUs: --gpus-per-node 0",
            "devices.use",
        )
    if cpus:
        return int(cpus.group(1) or 1)
    if not nodes.gpus:
        raise UserError(
            f"a job without GPUs, and devices.use is {use}",
            "say how many CPU ranks a machine has: --devices cpu:N",
            "--gpus-per-node",
        )
    if use not in {"auto", "all"} and len(use.split(",")) != nodes.gpus:
        raise UserError(
            f"devices.use names the GPUs {use}, and the job asks for"
            f" {counted(nodes.gpus, 'GPU')} on each machine",
            f"--devices auto, or --gpus-per-node {len(use.split(','))}",
            "devices.use",
        )
    return nodes.gpus


def machine_of(nodes: Nodes) -> Machine | None:
    """The machine that the job asks for. None: which GPUs it has is not known.

    UserError: the GPUs are not on file.
    """
    if not nodes.gpus:
        return replace(probe(), devices=(), links=(), hosts=nodes.count)
    if not nodes.gpu_type:
        return None
    device = device_spec(nodes.gpu_type, _GPU)
    named = device.name.replace(" ", "")
    return read_cluster(f"{nodes.count}x{nodes.gpus}x{named}").machine


def plan_job(loaded: LoadedConfig, nodes: Nodes) -> Plan | None:
    """The run's plan on the job's machines. None: it can't be known, since their GPUs are not.

    UserError: the config can't run there.
    """
    config = loaded.config
    devices = devices_per_node(config, nodes)
    machine = machine_of(nodes)
    if machine is None:
        return None
    if config.engine == "jax":
        machine = replace(machine, started=nodes.count)
    planned = plan(config, machine, describe(config))
    used, in_job = planned.layout.num_devices, nodes.count * devices
    if used != in_job:
        raise UserError(
            f"strategy {planned.layout.strategy} uses {counted(used, 'device')}, and the job asks"
            f" for {in_job}",
            "--strategy ddp, or fewer machines and GPUs",
            "devices.strategy",
        )
    return planned


def ranks_per_node(config: Config, nodes: Nodes, planned: Plan | None) -> int:
    """Processes of a machine. UserError: the plan's processes can't be spread over the machines."""
    if config.engine == "jax":
        return 1
    if planned is None:
        return devices_per_node(config, nodes)
    each, rest = divmod(planned.layout.world_size, nodes.count)
    if rest or not each:
        raise UserError(
            f"strategy {planned.layout.strategy} has a world size of {planned.layout.world_size},"
            f" and the job has {nodes.count} machines",
            "--strategy ddp, or --nodes 1",
            "devices.strategy",
        )
    return each
