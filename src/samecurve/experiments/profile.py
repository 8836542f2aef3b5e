"""`samecurve profile`: the config's own plan for a few steps, in throw-away processes, watched.

Nothing is left but a trace that was asked for.
"""

import gzip
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from samecurve.core.config.sections import Config, LoadedConfig
from samecurve.core.planning.facts import Facts, Measure
from samecurve.core.planning.machine import Machine
from samecurve.core.planning.plan import Intervals, Plan, plan
from samecurve.core.profile_types import ProfileSchedule, RankProfile
from samecurve.errors import RunError, UserError
from samecurve.experiments.profiled import Profile, Traced, as_json, as_text, head
from samecurve.experiments.scratch import scratch
from samecurve.launch.pool import JobFailed, Pool, pool
from samecurve.probe import probe
from samecurve.run.attempt import Attempt
from samecurve.run.describe import describe
from samecurve.run.directory import Run
from samecurve.worker.jobs.profile import watch_rank

_PATIENCE = 3600.0  # seconds for all steps
_FILES = (".json", ".json.gz")
_LOG_LINES = 12


@dataclass(frozen=True)
class Place:
    """Where traces go: a file, for the first rank's, or a directory for all of them."""

    path: Path

    @property
    def file(self) -> bool:
        return self.path.name.endswith(_FILES)

    def check(self) -> None:
        """UserError: something is there, or nothing can be written there."""
        if self.path.exists() and (self.file or not self.path.is_dir() or any(self.path.iterdir())):
            raise UserError(
                f"--trace: {self.path} is there already", "another name, or take it away", "--trace"
            )
        above = next(parent for parent in self.path.absolute().parents if parent.exists())
        try:
            with tempfile.TemporaryFile(dir=above):
                pass
        except OSError as error:
            raise UserError(
                f"--trace: nothing can be written into {above}: {error.strerror}",
                "a directory of yours",
                "--trace",
            ) from None

    def publish(self, found: Sequence[RankProfile]) -> list[Traced]:
        """Whole files only: copied beside their place, then renamed."""
        traces = [Path(one.trace) for one in found if one.trace]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(f"{self.path.name}.part-{os.getpid()}")
        try:
            if self.file:
                _copy(traces[0], part, self.path.name.endswith(".gz"))
                part.rename(self.path)
                return [_traced(self.path)]
            part.mkdir()
            names = [f"rank-{one.rank}.json.gz" for one in found]
            for trace, name in zip(traces, names, strict=True):
                _copy(trace, part / name, True)
            part.rename(self.path)
            return [_traced(self.path / name) for name in names]
        finally:
            if part.is_dir():
                shutil.rmtree(part, ignore_errors=True)
            else:
                part.unlink(missing_ok=True)


def _copy(trace: Path, to: Path, packed: bool) -> None:
    if packed:
        shutil.copyfile(trace, to)
        return
    with gzip.open(trace) as read, open(to, "wb") as written:
        shutil.copyfileobj(read, written)


def _traced(path: Path) -> Traced:
    return Traced(str(path), path.stat().st_size)


def profile(
    loaded: LoadedConfig,
    steps: int,
    top: int,
    trace: Path | None,
    json: bool,
    known: Measure | None = None,
) -> int:
    """known: measures what the plan is to know.

    Prints what was found; returns the exit code. SamecurveError: a rank failed, or the trace can't
    be written (after all else was printed).
    """
    config, machine = loaded.config, probe()
    place = Place(trace) if trace else None
    if place:
        place.check()
    facts = describe(config)
    facts = known(config, machine, facts) if known else facts
    course = ProfileSchedule(timed=steps)
    made = watched_plan(config, machine, facts, course)
    if not json:
        click.echo(head(made, course), err=True)
    failed: OSError | None = None
    with scratch("profile") as home, pool(made.world_size, home / "ranks.log", _PATIENCE) as ranks:
        found = measure(config, made, course, ranks, home, place is not None)
        try:
            traces = place.publish(found.ranks) if place else []
        except OSError as error:
            traces, failed = [], error
    found = replace(found, traces=tuple(traces))
    click.echo(as_json(found, loaded.name, top) if json else as_text(found, top))
    if failed and place:
        raise RunError(
            f"the trace was not written to {place.path}: {failed.strerror}",
            "another --trace",
            "--trace",
        ) from failed
    return 0


def watched_plan(config: Config, machine: Machine, facts: Facts, course: ProfileSchedule) -> Plan:
    """The config's own plan, for as many steps as are watched; neither evaluated nor saved."""
    return short(plan(config, machine, facts), course)


def short(made: Plan, course: ProfileSchedule) -> Plan:
    """Only as many steps as are watched."""
    return replace(
        made,
        steps=course.steps,
        eval_samples=0,
        every=Intervals(log=made.every.log, evaluate=0, save=0, sample=0),
    )


def measure(
    config: Config,
    made: Plan,
    course: ProfileSchedule,
    ranks: Pool,
    home: Path,
    traced: bool = False,
    watched: Callable[..., Any] = watch_rank,
) -> Profile:
    """traced: the profiler's traces are kept.

    watched: what a rank does, replaced only to plant faults. RunError: a rank failed, with the last
    lines it wrote if it ended without a word.
    """
    run = Run(home / "run")
    run.logs.mkdir(parents=True)
    run.write(config, made, {}, {})
    try:
        found = ranks.run(
            made.world_size,
            watched,
            Attempt("profile", str(run.home)).to_json(),
            course,
            traced,
            backend=made.backend if made.backend in {"gloo", "nccl"} else "gloo",
        )
    except JobFailed as error:
        raise RunError(
            f"{error.cause}\n{_last_words(error, home / 'ranks.log')}".rstrip(),
            error.remedy
            or ("`samecurve plan --probe-batch` tries what fits" if error.ended else ""),
        ) from None
    return Profile(made, course, tuple(one.whole() for one in found))


def _last_words(error: JobFailed, log: Path) -> str:
    """Of a rank that ended: what it wrote; of one that failed without a remedy of ours: where."""
    if error.ended and log.exists():
        return "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
    at = error.trace.rfind("  File ")
    return "" if error.remedy or at < 0 else "\n".join(error.trace[at:].splitlines()[:2])
