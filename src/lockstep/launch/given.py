"""The run of processes that torchrun, Slurm or the user started: on as many devices as there are processes for."""

import os
from dataclasses import replace

from lockstep.core.config import Loaded
from lockstep.core.place import choose_devices
from lockstep.core.protocols import Rank
from lockstep.errors import UserError
from lockstep.launch.place import check_port
from lockstep.launch.prepare import Options, Prepared, prepare
from lockstep.probe import probe


def given(loaded: Loaded, rank: Rank, options: Options) -> Prepared:
    """What the processes that were started are to do. UserError: they are not what the config asks for."""
    jax = loaded.config.engine == "jax"
    if rank.hosts > 1 and not jax:
        raise UserError(f"{rank.world} ranks on {rank.hosts} machines: engine torch trains on one in this version", "one machine, or --engine jax", "engine")
    machine = replace(probe(), started=rank.world, hosts=rank.hosts) if jax else probe()
    prepared = prepare(_on_ranks(loaded, rank.world // rank.hosts, jax), options, machine=machine)
    if prepared.plan.processes != rank.world:
        prepared.lock.release()
        raise UserError(f"strategy {prepared.plan.strategy} is one process; {rank.world} were started", "one process, or --strategy ddp", "devices.strategy")
    if jax and rank.world > 1:
        port = int(os.environ["MASTER_PORT"]) + 1  # one that whoever opens ports between hosts can know
        check_port(port)
        prepared.attempt = replace(prepared.attempt, coordinator=f"{os.environ['MASTER_ADDR']}:{port}")
    return prepared


def _on_ranks(loaded: Loaded, count: int, jax: bool) -> Loaded:
    """The config on as many devices of this host as ranks were started on it (jax: a rank may hold several). UserError: it asks for other ones."""
    devices = loaded.config.devices
    gpus = len(probe().devices)
    use = devices.use
    if use in {"auto", "all"} and (not gpus or not jax):
        use = ",".join(map(str, range(count))) if gpus else f"cpu:{count}"
    if use == "cpu":
        use = f"cpu:{count}"
    config = loaded.config.model_copy(update={"devices": devices.model_copy(update={"use": use})})
    found = len(choose_devices(config, probe(), {}))
    if found != count and not jax:
        raise UserError(f"torchrun started {count} ranks; devices {devices.use} names {found}", f"--nproc_per_node={found}, or leave --devices out", "devices.use")
    return replace(loaded, config=config)
