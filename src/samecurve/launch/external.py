"""This process as a rank that torchrun, Slurm or the user started."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from samecurve.core.config.sections import LoadedConfig
from samecurve.core.planning.layout import choose_devices
from samecurve.core.protocols import Rank
from samecurve.diagnose.crash import explain
from samecurve.diagnose.notes import FailureNote, note_of, read_notes
from samecurve.errors import RunError, SamecurveError, UserError
from samecurve.launch.hang_watch import HangWatch, overseen
from samecurve.launch.monitors import done_line, tracked, watched
from samecurve.launch.rank_agreement import check_ranks_agree, report_config
from samecurve.launch.signals import run_child
from samecurve.observe.console import make_view, show_journal
from samecurve.probe import probe
from samecurve.probe.cpu import oom_kills, oom_kills_since
from samecurve.run.attempt import Attempt
from samecurve.run.directory import Run, log_to
from samecurve.run.preconditions import check_port
from samecurve.run.prepare import PreparedRun, prepare
from samecurve.run.resume import Options
from samecurve.worker.cluster_env import meet
from samecurve.worker.main import _LAST, guarded, work
from samecurve.worker.preflight import left_hanging, record_failure


def prepare_external(loaded: LoadedConfig, rank: Rank, options: Options) -> PreparedRun:
    """What the processes that were started are to do.

    UserError: they are not what the config asks for.
    """
    jax = loaded.config.engine == "jax"
    if rank.hosts > 1 and not jax:
        raise UserError(
            f"{rank.world_size} ranks on {rank.hosts} machines: engine torch trains on one in this"
            " version",
            "one machine, or --engine jax",
            "engine",
        )
    machine = replace(probe(), started=rank.world_size, hosts=rank.hosts) if jax else probe()
    prepared = prepare(
        _on_ranks(loaded, rank.world_size // rank.hosts, jax), options, machine=machine
    )
    if prepared.plan.world_size != rank.world_size:
        prepared.lock.release()
        raise UserError(
            f"strategy {prepared.plan.strategy} is one process; {rank.world_size} were started",
            "one process, or --strategy ddp",
            "devices.strategy",
        )
    if jax and rank.world_size > 1:
        port = (
            int(os.environ["MASTER_PORT"]) + 1
        )  # one that whoever opens ports between hosts can know
        check_port(port)
        prepared.attempt = replace(
            prepared.attempt, coordinator=f"{os.environ['MASTER_ADDR']}:{port}"
        )
    return prepared


def _on_ranks(loaded: LoadedConfig, count: int, jax: bool) -> LoadedConfig:
    """The config on as many devices of this host as ranks were started on it (jax: a rank may hold
    several). UserError: it asks for other ones.
    """
    devices = loaded.config.devices
    gpus = len(probe().devices)
    use = devices.use
    if use in {"auto", "all"} and (not gpus or not jax):
        use = ",".join(map(str, range(count))) if gpus else f"cpu:{count}"
    if use == "cpu":
        use = f"cpu:{count}"
    config = loaded.config.model_copy(update={"devices": devices.model_copy(update={"use": use})})
    found = len(choose_devices(config, probe()).value)
    if found != count and not jax:
        raise UserError(
            f"torchrun started {count} ranks; devices {devices.use} names {found}",
            f"--nproc_per_node={found}, or leave --devices out",
            "devices.use",
        )
    return replace(loaded, config=config)


_WORD = "samecurve/word"  # from the first rank to the others, before they start
_READ = "samecurve/read"  # how many have read it
_PREPARED = (
    7 * 86_400.0
)  # seconds; a large corpus takes its time; torchrun ends the others if the first rank dies
_REST = 10.0  # seconds for trackers to take the rest, within what torchrun leaves
_OTHERS = 1.0  # seconds in which ranks that failed first have left their notes


def run_as_external_rank(
    rank: Rank, read: Callable[[bool], LoadedConfig], options: Options, headless: bool
) -> int:
    """This process as a rank that torchrun, Slurm or the user started.

    The first rank prepares the run, tells the others, and speaks for all. read: the config, saying
    what is to be said or not. Returns the exit code.
    """
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # as the probe counts
    store, ranks = meet(serves=rank.index == 0)
    if rank.index:
        report_config(store, rank, lambda: read(False), _WORD)
        return follow_leader(rank, store, ranks)
    try:
        loaded = read(True)
        check_ranks_agree(store, rank, loaded)
        prepared = prepare_external(loaded, rank, options)
    except BaseException as error:
        _tell(store, rank, {"leave": error.exit_code if isinstance(error, SamecurveError) else 1})
        raise
    if prepared.done:
        _tell(store, rank, {"leave": 0})
        print(done_line(prepared), file=sys.stderr if headless else sys.stdout)
        return 0
    store.set(_WORD, json.dumps({"attempt": asdict(prepared.attempt)}))
    return _lead(prepared, loaded.config.devices.hang_floor, rank, ranks, headless)


def _lead(prepared: PreparedRun, hang_floor: float, rank: Rank, ranks: Any, headless: bool) -> int:
    """The first rank trains, and shows what the run does. SamecurveError: why it failed."""
    own: list[FailureNote] = []
    exits: dict[int, int] = {}
    run, every, starved = prepared.run, prepared.track.sensors_every, oom_kills()
    watch = overseen(
        HangWatch(run.logs, run.processes, prepared.plan.world_size, hang_floor),
        lambda error: left_hanging(run, error),
    )
    with (
        show_journal(make_view(prepared.plan, run.home, headless), run.journal, prepared.begin),
        tracked(run, prepared.track, _REST),
        watched(run, prepared.plan, every),
        watch,
    ):
        try:
            if not prepared.attempt.coordinator:
                work(prepared.attempt, rank, store=ranks, catch_stop=True)
                return 0
            code = run_child(prepared.attempt)
            if code == 0 or code > 128:
                return code
            exits = {rank.index: code}
        except BaseException as error:
            own = [note_of(rank.index, error)]
    time.sleep(_OTHERS)
    failure = explain(
        sorted(
            [*read_notes(prepared.run.logs, prepared.attempt.name), *own],
            key=lambda note: note.time,
        ),
        exits,
        prepared.run.logs,
        oom_kills=oom_kills_since(starved),
    )
    record_failure(prepared.run, failure)
    raise failure


def follow_leader(rank: Rank, store: Any, ranks: Any) -> int:
    """Another rank does what the first one says."""
    until = time.monotonic() + _PREPARED
    while not store.check([_WORD]):
        time.sleep(0.1)
        if time.monotonic() > until:
            raise RunError(
                "the first rank never said what to do",
                "its terminal or log says why",
                "--rdzv",
                again=True,
            )
    word = json.loads(store.get(_WORD))
    store.add(_READ, 1)
    if "leave" in word:
        return int(word["leave"])
    attempt = Attempt.from_values(word["attempt"])
    if rank.hosts > 1 and not rank.local:
        print(
            f"rank {rank.index} of {rank.world_size} trains in {attempt.run}; the first host shows how"
            " it goes",
            flush=True,
        )
    if attempt.coordinator:
        return _followed(run_child(attempt), rank, attempt)
    log_to(Run(Path(attempt.run)).logs / f"rank-{rank.index}.log", attempt.name)
    code = guarded(attempt, rank, store=ranks, catch_stop=True)
    os._exit(code)  # not waiting for a collective that a lost rank left hanging


def _followed(code: int, rank: Rank, attempt: Attempt) -> int:
    """The exit code of a rank that is not the first.

    The first one's terminal says what failed; this one's, that something did.
    """
    if code and code < 128:
        logs = Run(Path(attempt.run)).logs
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        print(
            f"error: rank {rank.index} left with {how}\n  remedy: the first host's terminal says"
            f" why; {logs / f'rank-{rank.index}.log'} has more",
            file=sys.stderr,
        )
    return 1 if code < 0 else code


def _tell(store: Any, rank: Rank, word: dict[str, Any]) -> None:
    """The last word to the others.

    The store may live in this process: it stays until they have read it.
    """
    store.set(_WORD, json.dumps(word))
    until = time.monotonic() + _LAST
    while store.add(_READ, 0) < rank.world_size - 1 and time.monotonic() < until:
        time.sleep(0.05)
