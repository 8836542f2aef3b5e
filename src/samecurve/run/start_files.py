"""The files of a run as the ranks find them when they start: config, plan, weights, journal."""

import shutil
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from samecurve.checkpoint.store import sweep
from samecurve.core.config.document import Document
from samecurve.core.config.loading import LoadedConfig, load_document
from samecurve.core.config.sections import Config, Track
from samecurve.core.events import Event, Kind
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.machine import Machine
from samecurve.core.planning.plan import Plan
from samecurve.core.system import write_json
from samecurve.observe import (
    VERSION,
    append_event,
    cut_torn_line,
    has_finished,
    last_step,
)
from samecurve.run.directory import Lock, Run
from samecurve.run.directory.attempt import Attempt, clear_logs, new_attempt_name, surroundings
from samecurve.run.preconditions import remove_cut_off
from samecurve.run.resume import (
    Options,
    Origin,
    set_later_aside,
)
from samecurve.tasks import Tasks
from samecurve.tasks.user_class import is_pickled, place_of
from samecurve.units import counted

if TYPE_CHECKING:  # most runs have no base, and no store
    from samecurve.run.remote.claimed import Claim
    from samecurve.run.remote.stored_run import Mirrored
    from samecurve.run.weights.base_files import Base


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A run ready to start, its lock held."""

    run: Run
    plan: Plan
    attempt: Attempt
    lock: Lock
    journal_start: int  # length of its journal before this start, in bytes
    done: bool  # whether nothing is left to train
    step: int  # of the checkpoint that it goes on from; 0: a new run
    track: Track  # which trackers read along
    claim: "Claim | None" = None  # on the place in a store where the run is mirrored


@dataclass(frozen=True, kw_only=True)
class AcceptedStart:
    """A start that was accepted: nothing of it is refused any more, nothing is written yet."""

    run: Run
    lock: Lock
    loaded: LoadedConfig
    options: Options
    origin: Origin
    plan: Plan
    facts: Facts
    machine: Machine
    weights: str | None  # path of the weights that it begins with
    has_copy: bool  # whether the run keeps a copy of them: all its weights, or an adapter
    base: "Base | None"  # a frozen base, of which the run keeps no copy
    mirrored: "Mirrored | None" = None  # where the directory is mirrored


def write_start(accepted: AcceptedStart) -> PreparedRun:
    """Write the files that the ranks read, and the journal's first lines."""
    run, origin = accepted.run, accepted.origin
    journal_start = _mend(run)
    _note_lost_lines(run, origin)
    _note_other_precision(accepted)
    prepared = PreparedRun(
        run=run,
        plan=accepted.plan,
        attempt=_attempt(accepted),
        lock=accepted.lock,
        journal_start=journal_start,
        done=origin.has_ended(accepted.plan) and has_finished(run.journal, origin.step),
        step=origin.step,
        track=accepted.loaded.config.track,
    )
    if not prepared.done:
        _write_files(accepted)
        _write_journal(accepted, prepared)
    elif not run.results.is_file():  # the run was killed at its last moment
        from samecurve.run.directory.results_file import write_results

        write_results(run, accepted.plan, accepted.loaded.config)
    return prepared


def _mend(run: Run) -> int:
    """Repair what an earlier start left half done. Returns the journal's length in bytes."""
    if not run.exists():
        remove_cut_off(run)
    for directory in (run.checkpoints, run.logs):
        directory.mkdir(exist_ok=True)
    clear_logs(run.logs)
    sweep(run.checkpoints)
    cut_torn_line(run.journal)
    if not run.journal.exists():
        return 0
    return run.journal.stat().st_size


def _note_other_precision(accepted: AcceptedStart) -> None:
    """Note where train.amp comes to another precision on the present devices."""
    run, now = accepted.origin.run, accepted.plan.compute.precision
    if run is None or not accepted.loaded.config.train.amp:
        return
    before = run.read_plan().compute.precision
    if before != now:
        accepted.origin.notes.append(
            f"this run computed in {before} until here, and goes on in {now}, which train.amp comes"
            f" to on {accepted.plan.layout.devices[0].name}: another curve;"
            f" --dtype {before} keeps it"
        )


def _note_lost_lines(run: Run, origin: Origin) -> None:
    """Note lines that the journal lacks: a save waits for them, so somebody cut the file."""
    if not origin.own or origin.checkpoint is None:
        return
    written = last_step(run.journal)
    if written < origin.step:
        origin.notes.append(
            f"journal.jsonl lacks steps {written + 1} to {origin.step}, which"
            f" {origin.checkpoint.name} holds: what reads it (report, losses) will not know them"
        )


def _attempt(accepted: AcceptedStart) -> Attempt:
    run, origin, stop_after = accepted.run, accepted.origin, accepted.options.stop_after
    attempt = Attempt(name=new_attempt_name(), run=str(run.home))
    if origin.checkpoint:
        attempt = replace(attempt, resume=str(origin.checkpoint))
    elif accepted.has_copy:
        attempt = replace(attempt, weights=str(run.initial))
    if stop_after is not None:
        attempt = replace(attempt, stop_at=origin.step + stop_after)
    return attempt


def _write_files(accepted: AcceptedStart) -> None:
    run, origin = accepted.run, accepted.origin
    parent = None
    if run.exists():
        parent = run.parent_checkpoint()
    elif origin.checkpoint and not origin.own:
        parent = str(origin.checkpoint)
    if accepted.base:
        write_json(run.base, accepted.base.to_json())
    if accepted.has_copy and not run.exists():
        from samecurve.run.weights.initial_weights import publish

        publish(run)
    if accepted.mirrored:
        accepted.mirrored.write(run)
    if ":" in accepted.loaded.config.task:
        from samecurve.tasks.user_class.kept_source import keep_source

        line = keep_source(run.home, accepted.loaded.config.task, step=origin.step)
        origin.notes.extend([line] if line else [])
    run.write(
        _keep_task(run, accepted.loaded.config),
        accepted.plan,
        origins=accepted.loaded.origins,
        formulas=accepted.facts.formulas,
        parent_checkpoint=parent,
        weights_path=accepted.weights,
    )


def _keep_task(run: Run, config: Config) -> Config:
    """The config whose task's class, if another place keeps it, is copied into the run."""
    place = place_of(config.task)
    if place is None or not is_pickled(place.path):
        return config
    if place.path.resolve() != run.task.resolve():
        scratch = run.task.with_name(f"{run.task.name}.part")
        shutil.copyfile(place.path, scratch)
        scratch.replace(run.task)
    values = {**config.model_dump(mode="json"), "task": f"{run.task}:{place.name}"}
    return load_document(Document(values), Tasks()).config


def _write_journal(accepted: AcceptedStart, prepared: PreparedRun) -> None:
    run, origin, start_plan = accepted.run, accepted.origin, accepted.plan

    def record(kind: Kind, **values: object) -> None:
        append_event(run.journal, Event(kind, origin.step, values))

    record(
        "planned",
        journal=VERSION,
        attempt=prepared.attempt.name,
        run=str(run.home),
        plan=start_plan.to_json(),
        environment=surroundings(start_plan.layout.engine, accepted.machine),
    )
    if origin.run:
        is_own = origin.own and origin.checkpoint is not None
        origin.notes.extend(set_later_aside(run, origin.step if is_own else None))
    for note in (*accepted.loaded.notes, *origin.notes):
        record("warned", text=note)
    if prepared.journal_start or origin.checkpoint:
        record("resumed", attempt=prepared.attempt.name, text=_resumed_from(origin, start_plan))


def _resumed_from(origin: Origin, plan: Plan) -> str:
    if origin.checkpoint is None:
        return "nothing was saved before: from the start"
    return (
        f"from {origin.checkpoint}; batch {plan.batch.global_batch_size}: {plan.reasons['batch']};"
        f" on {counted(plan.layout.num_devices, 'device')}"
    )
