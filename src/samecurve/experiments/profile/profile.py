"""`samecurve profile`: measure a few steps of the config's own plan in throw-away processes.

Only a requested trace is left.
"""

import gzip
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from samecurve.core.config.loading import LoadedConfig
from samecurve.core.config.sections import Config
from samecurve.core.measurement.profile_types import ProfileSchedule, RankProfile
from samecurve.core.planning.facts import Facts, Measure
from samecurve.core.planning.machine import Machine
from samecurve.core.planning.plan import Plan
from samecurve.core.planning.planner import plan
from samecurve.errors import RunError, UserError
from samecurve.experiments.output_directory import check_writable
from samecurve.experiments.profile.profile_text import Profile, TraceFile, as_text, head
from samecurve.experiments.profile.profile_text import as_json as profile_json
from samecurve.experiments.scratch import for_steps_alone, make_run, run_on_ranks, scratch
from samecurve.launch.pool import JobFailedError, Pool, pool
from samecurve.probe import probe
from samecurve.run.describe import describe
from samecurve.run.directory.attempt import Attempt
from samecurve.terminal import echo
from samecurve.worker.jobs.profile_job import watch_rank

_PATIENCE = 3600.0  # seconds for all steps
_FILES = (".json", ".json.gz")
_LOG_LINES = 12


@dataclass(frozen=True)
class TraceTarget:
    """The target of traces: a file for the first rank's trace, or a directory for all traces."""

    path: Path

    @property
    def is_file(self) -> bool:
        return self.path.name.endswith(_FILES)

    def check(self) -> None:
        """Check the target. UserError: it exists already, or can't be written."""
        empty_directory = self.path.is_dir() and not any(self.path.iterdir())
        if self.path.exists() and (self.is_file or not empty_directory):
            raise UserError(
                f"--trace: {self.path} is there already",
                "choose another name, or delete it",
                "--trace",
            )
        remedy = "--trace PATH in a directory in which you may write"
        check_writable(self.path.absolute().parent, "--trace", remedy)

    def publish(self, ranks: Sequence[RankProfile]) -> list[TraceFile]:
        """Publish complete files: copy them beside their target, then rename them."""
        traces = [Path(rank.trace) for rank in ranks if rank.trace]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(f"{self.path.name}.part-{os.getpid()}")
        try:
            if self.is_file:
                if self.path.name.endswith(".gz"):
                    shutil.copyfile(traces[0], part)
                else:
                    _unpack(traces[0], part)
                part.rename(self.path)
                return [_trace_file(self.path)]
            part.mkdir()
            names = [f"rank-{rank.rank}.json.gz" for rank in ranks]
            for trace, name in zip(traces, names, strict=True):
                shutil.copyfile(trace, part / name)
            part.rename(self.path)
            return [_trace_file(self.path / name) for name in names]
        finally:
            if part.is_dir():
                shutil.rmtree(part, ignore_errors=True)
            else:
                part.unlink(missing_ok=True)


def _unpack(trace: Path, to: Path) -> None:
    with gzip.open(trace) as source, open(to, "wb") as target:
        shutil.copyfileobj(source, target)


def _trace_file(path: Path) -> TraceFile:
    return TraceFile(str(path), path.stat().st_size)


def profile(
    loaded: LoadedConfig,
    *,
    steps: int,
    top: int,
    trace: Path | None,
    as_json: bool,
    measure: Measure | None = None,
) -> int:
    """Measure and print a profile; return the exit code.

    steps: number of timed steps
    top: number of costliest operations that are shown
    trace: target of the traces
    measure: measures what the plan goes by

    SamecurveError: a rank failed, or the trace can't be written (after everything was printed).
    """
    config, machine = loaded.config, probe()
    target = TraceTarget(trace) if trace else None
    if target:
        target.check()
    facts = describe(config)
    if measure:
        facts = measure(config, machine, facts)
    schedule = ProfileSchedule(timed=steps)
    plan = plan_profile(config, machine, facts, schedule)
    if not as_json:
        echo(head(plan, schedule), err=True)
    unwritten: OSError | None = None
    with (
        scratch("profile") as home,
        pool(plan.layout.world_size, home / "ranks.log", _PATIENCE) as ranks,
    ):
        profile = run_profile(
            config, plan, schedule, ranks=ranks, home=home, keep_traces=target is not None
        )
        try:
            traces = target.publish(profile.ranks) if target else []
        except OSError as error:
            traces, unwritten = [], error
    profile = replace(profile, traces=tuple(traces))
    echo(profile_json(profile, loaded.name, top) if as_json else as_text(profile, top))
    if unwritten and target:
        raise RunError(
            f"the trace was not written to {target.path}: {unwritten.strerror}",
            "another --trace",
            "--trace",
        ) from unwritten
    return 0


def plan_profile(config: Config, machine: Machine, facts: Facts, schedule: ProfileSchedule) -> Plan:
    """Plan the config for the measured steps, without evaluation and checkpoints."""
    return shorten(plan(config, machine, facts), schedule)


def shorten(plan: Plan, schedule: ProfileSchedule) -> Plan:
    """Shorten the config to the measured steps."""
    return replace(for_steps_alone(plan), steps=schedule.steps)


def run_profile(
    config: Config,
    plan: Plan,
    schedule: ProfileSchedule,
    *,
    ranks: Pool,
    home: Path,
    keep_traces: bool = False,
    job: Callable[..., Any] = watch_rank,
) -> Profile:
    """Measure the steps of a plan.

    home: directory of the run
    keep_traces: whether the profiler's traces are kept
    job: the work of a rank; tests replace it to simulate faults

    RunError: a rank failed. If it gave no reason, the error has its last lines.
    """
    run = make_run(home / "run", config, plan)
    attempt = Attempt("profile", str(run.home)).to_json()
    try:
        watched = (attempt, schedule, str(run.home) if keep_traces else None)
        profiles = run_on_ranks(ranks, plan, job, *watched)
    except JobFailedError as error:
        remedy = error.remedy
        if error.ended and not remedy:
            remedy = "`samecurve plan --probe-batch` tries what fits"
        cause = f"{error.cause}\n{_last_words(error, home / 'ranks.log')}".rstrip()
        raise RunError(cause, remedy) from None
    return Profile(plan, schedule, tuple(rank.without_short_steps() for rank in profiles))


def _last_words(error: JobFailedError, log: Path) -> str:
    """The last output of a rank that ended, or the log of a rank that failed without a remedy."""
    if error.ended and log.exists():
        return "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
    innermost = error.trace.rfind("  File ")
    if error.remedy or innermost < 0:
        return ""
    return "\n".join(error.trace[innermost:].splitlines()[:2])
