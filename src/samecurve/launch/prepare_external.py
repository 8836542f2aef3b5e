"""Prepares a run for ranks that torchrun, Slurm, the user or our own agents have started."""

import os
from dataclasses import replace
from pathlib import Path

from samecurve.core.config.loading import LoadedConfig
from samecurve.core.planning.facts import Measure
from samecurve.core.planning.machine import choose_devices
from samecurve.core.protocols import Rank
from samecurve.errors import UserError
from samecurve.probe import probe
from samecurve.run.preconditions import check_port, remove_refused
from samecurve.run.prepare import StartRequest, prepare
from samecurve.run.resume import Options
from samecurve.run.start_files import PreparedRun
from samecurve.worker import FACTS, GROUP, LEAVES


def prepare_external(
    loaded: LoadedConfig, rank: Rank, options: Options, measure: Measure, cores: int
) -> PreparedRun:
    """Prepare a run for the processes that were started.

    measure: measures what the plan goes by
    cores: that those of a host may use together

    UserError: the config asks for other processes.
    """
    is_jax = loaded.config.engine == "jax"
    machine = replace(probe(), started=rank.world_size, hosts=rank.hosts, cores=cores)
    options = replace(options, group=os.environ.get(GROUP, ""))
    loaded = _on_ranks(loaded, rank.world_size // rank.hosts, may_differ=is_jax)
    facts = Path(os.environ[FACTS]) if FACTS in os.environ else None
    prepared = prepare(
        StartRequest(
            loaded=loaded, options=options, machine=machine, measure=measure, kept_facts=facts
        )
    )
    if prepared.plan.layout.world_size != rank.world_size:
        take_back(prepared)
        raise UserError(
            f"strategy {prepared.plan.layout.strategy} is one process; {rank.world_size} were"
            " started",
            "one process, or --strategy ddp",
            "devices.strategy",
        )
    batch = loaded.config.batch
    if LEAVES in os.environ and batch.samples is None and prepared.journal_start == 0:
        take_back(prepared)
        raise UserError(
            f"{batch.per_device} on each device: with --nnodes MIN:MAX the hosts that come first"
            " would decide how many samples a step has",
            f"--global-batch N; {prepared.plan.batch.global_batch_size} is what these devices"
            " would take",
            "batch.per_device",
        )
    if is_jax and rank.world_size > 1:
        # a port that can be known beforehand by a person who opens ports between hosts
        port = int(os.environ["MASTER_PORT"]) + 1
        check_port(port)
        coordinator = f"{os.environ['MASTER_ADDR']}:{port}"
        attempt = replace(prepared.attempt, coordinator=coordinator)
        prepared = replace(prepared, attempt=attempt)
    return prepared


def take_back(prepared: PreparedRun) -> None:
    """Let go of a run that is refused, and remove it if it is new."""
    prepared.lock.release()
    if prepared.journal_start == 0:
        remove_refused(prepared.run)


def _on_ranks(loaded: LoadedConfig, count: int, *, may_differ: bool) -> LoadedConfig:
    """The config with as many devices of this host as ranks were started on it.

    may_differ: a rank may hold several devices.

    UserError: the config asks for other devices.
    """
    devices = loaded.config.devices
    gpus = len(probe().devices)
    use = devices.use
    if use in {"auto", "all"} and not gpus:
        use = f"cpu:{count}"
    elif use in {"auto", "all"} and not may_differ:
        use = ",".join(map(str, range(count)))
    elif use == "cpu":
        use = f"cpu:{count}"
    config = loaded.config.with_values(devices={"use": use})
    chosen = len(choose_devices(config.devices, config.engine, probe()).value)
    if chosen != count and not may_differ:
        raise UserError(
            f"torchrun started {count} ranks; devices {devices.use} names {chosen}",
            f"--nproc_per_node={chosen}, or leave --devices out",
            "devices.use",
        )
    return replace(loaded, config=config)
