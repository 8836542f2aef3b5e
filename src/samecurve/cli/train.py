"""`samecurve train`."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from samecurve.cli.load_config import load_config, measure_before, probe_facts
from samecurve.cli.options import (
    ConfigVerb,
    init_from_option,
    probe_option,
    run_place_option,
)
from samecurve.errors import Interrupted, keeping
from samecurve.terminal import echo

if TYPE_CHECKING:
    from samecurve.core.config.loading import LoadedConfig
    from samecurve.run.resume import Options

_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"


@click.command(cls=ConfigVerb, help_group="Train")
@run_place_option
@click.option(
    "--resume",
    default="auto",
    show_default=True,
    metavar="auto|never|PATH",
    help="auto: go on where the run directory, or an unfinished run of this config, exists",
)
@click.option(
    "--new-batch",
    is_flag=True,
    help="on a resume, take the config's batch instead of the run's own",
)
@click.option(
    "--stop-after",
    type=click.IntRange(min=1),
    help="save and leave after so many steps; the schedule keeps its length",
)
@click.option(
    "--nnodes",
    default="1",
    show_default=True,
    metavar="N|MIN:MAX",
    help="hosts; the same command on each",
)
@click.option("--rdzv", metavar="HOST:PORT", help="where they meet: on the first of them")
@click.option(
    "--node-rank", type=click.IntRange(min=0), help="which of them this is, from 0; not needed"
)
@click.option("--headless", is_flag=True, help="JSON lines on stdout, nothing else there")
@init_from_option
@probe_option
def train(
    *,
    nnodes: str,
    rdzv: str | None,
    node_rank: int | None,
    headless: bool,
    probe_batch: bool,
    **flags: Any,
) -> None:
    """Train a model. Run the same command again to go on."""
    from samecurve.worker import started

    if "SLURM_JOB_ID" in os.environ and rdzv is None:  # else it says itself where the others are
        from samecurve.worker.slurm_env import check_slurm_job

        own_directory = flags["save_dir"] is not None or flags["resume"] != "auto"
        check_slurm_job(os.environ, own_directory=own_directory)
    if nnodes == "1" and (rdzv is not None or node_rank is not None):
        raise click.UsageError("--rdzv and --node-rank are for several hosts: give --nnodes too")
    if nnodes != "1" or started(os.environ):
        if probe_batch:
            raise click.UsageError(
                "--probe-batch starts processes of its own; try it first with `samecurve plan"
                " --probe-batch`"
            )
        if nnodes != "1":
            _train_on_hosts(flags, nnodes, rdzv, node_rank, headless=headless)
        _train_as_rank(flags, headless=headless)
    _train_here(flags, headless=headless, probe_batch=probe_batch)


def _train_here(flags: dict[str, Any], *, headless: bool, probe_batch: bool) -> None:
    """Train on this machine, whose ranks this process starts."""
    from samecurve.run.warm_start import WarmStart

    with WarmStart() as warm_start:
        if flags["engine"] in {None, "torch"}:
            warm_start.begin()
        loaded = load_config(flags, say=not headless)
        if loaded.config.engine != "torch":
            warm_start.stop()
        from samecurve.launch.local import launch
        from samecurve.launch.monitors import done_line
        from samecurve.run.prepare import StartRequest, prepare

        facts = probe_facts(loaded) if probe_batch else None
        prepared = prepare(
            StartRequest(
                loaded=loaded,
                options=_run_options(flags),
                facts=facts,
                measure=measure_before(warm_start.wait_for_imports),
                warm_start=warm_start,
            )
        )
        if prepared.done:
            prepared.lock.release()
            echo(done_line(prepared), err=headless)
            return
        with keeping(f"{prepared.run.home} has what was trained; the same command goes on from it"):
            code = launch(
                prepared, loaded.config.devices, headless=headless, server=warm_start.server
            )
    sys.exit(code)


@contextmanager
def _torch_silent() -> Iterator[None]:
    """Import torch in the block, without its warnings, each of which brings 30 lines of addresses.

    torch reads the variable once. The ranks do not inherit it: their logs keep all.
    """
    is_set = _LOG_LEVEL in os.environ
    os.environ.setdefault(_LOG_LEVEL, "ERROR")
    try:
        yield
    finally:
        if not is_set:
            del os.environ[_LOG_LEVEL]


def _train_on_hosts(
    flags: dict[str, Any], nnodes: str, rdzv: str | None, node_rank: int | None, *, headless: bool
) -> NoReturn:
    """Train with the ranks of this host, and of others that run the same command."""
    from samecurve.launch.nodes import read_hosts, way_to
    from samecurve.run.warm_start import WarmStart

    hosts = read_hosts(nodes=nnodes, rendezvous=rdzv, index=node_rank)
    loaded = load_config(flags, say=False, loud=False)
    with WarmStart() as warm_start:
        if loaded.config.engine == "torch":
            warm_start.begin()
        way = way_to(hosts)
        with _torch_silent():
            from samecurve.launch.host_launch import run_on_hosts  # imports torch

        code = run_on_hosts(loaded, hosts, way, warm_start, headless=headless)
    sys.exit(code)


def _train_as_rank(flags: dict[str, Any], *, headless: bool) -> NoReturn:
    """Train as one of several ranks that another program has started."""
    from samecurve.launch.external import run_as_external_rank
    from samecurve.processes import end_with
    from samecurve.worker import from_slurm, is_first, rank_from

    def read_config(*, loud: bool) -> "LoadedConfig":
        return load_config(flags, say=not headless, loud=loud)

    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with(os.getppid())
    elif "RANK" not in os.environ:
        os.environ.update(from_slurm(os.environ))
    rank = rank_from(os.environ)
    try:
        code = run_as_external_rank(
            rank,
            read_config,
            _run_options(flags),
            measure=measure_before(),
            headless=headless,
        )
        sys.exit(code)
    except Interrupted as stop:
        if is_first(rank):
            raise
        os._exit(128 + stop.number)  # the first rank says it, for all


def _run_options(flags: dict[str, Any]) -> "Options":
    """The flags beside the config, which say how this run begins and ends."""
    from samecurve.run.resume import Options

    names = {field.name for field in fields(Options)} & flags.keys()
    values = {name: flags[name] for name in names}
    for path, url in (("save_dir", "save_url"), ("init_from", "init_url")):
        if values[path] is not None and not isinstance(values[path], Path):
            values[url], values[path] = values[path], None
    return Options(**values)
