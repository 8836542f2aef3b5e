"""Everything before the first rank starts: which run directory, which checkpoint, which plan.

Nothing is written until all of it is accepted.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from samecurve.checkpoint.store import sweep
from samecurve.core.config.document import Document
from samecurve.core.config.loading import LoadedConfig, load
from samecurve.core.config.sections import Config, Track
from samecurve.core.events import Event, Kind
from samecurve.core.planning.facts import Facts, Measure, Speeds
from samecurve.core.planning.machine import Machine
from samecurve.core.planning.plan import Plan
from samecurve.core.planning.planner import plan
from samecurve.core.system.files import write_json
from samecurve.errors import UserError
from samecurve.observe.journal import append_event, cut_torn_line, last_step
from samecurve.probe import probe
from samecurve.run.describe import describe
from samecurve.run.directory.attempt import Attempt, new_attempt_name
from samecurve.run.directory.lock import Lock
from samecurve.run.directory.provenance import surroundings
from samecurve.run.directory.rank_logs import clear_logs
from samecurve.run.directory.run_directory import Run
from samecurve.run.directory.run_names import free_name
from samecurve.run.preconditions import (
    check_port,
    check_room,
    check_trackers,
    checkpoint_bytes,
    make_home,
    most_checkpoints,
    remove_unbegun,
)
from samecurve.run.resume import (
    Options,
    Origin,
    find_origin,
    fixed_of,
    refuse_changes,
    set_later_aside,
)
from samecurve.run.warm_start import WarmStart
from samecurve.tasks import Tasks, entry_of
from samecurve.tasks.user_class.class_place import place_of
from samecurve.tasks.user_class.pickled_class import is_pickled
from samecurve.units import counted

if TYPE_CHECKING:  # most runs begin from no weights
    from samecurve.run.weights.base_files import Base
    from samecurve.run.weights.initial_weights import Source


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A run ready to start, its lock held."""

    run: Run
    plan: Plan
    attempt: Attempt
    lock: Lock
    journal_start: int  # where its journal ended before
    done: bool  # nothing is left to train
    step: int  # of the checkpoint that it goes on from; 0: it begins
    track: Track  # which trackers read along


@dataclass(frozen=True, kw_only=True)
class _Accepted:
    """What a start follows from: nothing of it is refused any more, nothing is written yet."""

    run: Run
    lock: Lock
    loaded: LoadedConfig
    options: Options
    origin: Origin
    plan: Plan
    facts: Facts
    machine: Machine
    weights: str | None  # the path that its first weights come from
    base: "Base | None"  # those weights, where the run keeps no copy


def make_plan(
    loaded: LoadedConfig, facts: Facts | None = None, measure: Measure | None = None
) -> tuple[Plan, Facts]:
    """What `samecurve plan` shows: a run from the start. facts, measure: as prepare()."""
    machine, facts = probe(), facts or describe(loaded.config)
    if measure:
        facts = measure(loaded.config, machine, facts)
    return plan(loaded.config, machine, facts), facts


def prepare(
    loaded: LoadedConfig,
    options: Options,
    facts: Facts | None = None,
    *,
    machine: Machine | None = None,
    measure: Measure | None = None,
    warm_start: WarmStart | None = None,
) -> PreparedRun:
    """Decide everything, then write what the ranks read.

    facts: if they were measured.
    machine: another than this one by itself.
    measure: measures speeds, once all else is accepted.
    warm_start: gets the engine ready meanwhile.

    UserError: anything that can't be honoured; the disk is then as it was before.
    """
    machine = machine or probe()
    config = loaded.config
    options = _with_places_of(loaded, options)
    layout = _refuse_early(config, machine, measurable=measure is not None)
    check_trackers(config.track)
    if warm_start:
        warm_start.expect(layout, entry_of(config.task).libraries)
    facts = facts or describe(config, warm_start.server if warm_start else None)
    if warm_start and layout.is_one_process:  # it trains in this process, and wants the cores
        warm_start.stop()
    origin = find_origin(loaded, options)
    fixed = fixed_of(origin, options)
    refuse_changes(origin, config)
    if measure:
        facts = measure(config, machine, facts)
    accepted_plan = plan(config, machine, facts, fixed)
    base = weights = None
    if facts.frozen_base:
        from samecurve.run.weights.base_files import choose_base

        base = choose_base(origin, options.init_from, config, facts)
    elif options.init_from or (origin.run and origin.run.weights_path()):
        from samecurve.run.weights.initial_weights import choose_initial_weights

        weights = choose_initial_weights(origin, options.init_from, config, facts)
    check_port(config.devices.port)
    _refuse_finished(origin, accepted_plan)
    run = _make_run(loaded, options, origin, facts, accepted_plan)
    with _claimed(run) as lock:
        accepted = _Accepted(
            run=run,
            lock=lock,
            loaded=loaded,
            options=options,
            origin=origin,
            plan=accepted_plan,
            facts=facts,
            machine=machine,
            weights=base.path if base else _kept(weights, run, origin),
            base=base,
        )
        return _write(accepted)


def _with_places_of(loaded: LoadedConfig, options: Options) -> Options:
    """The options, with directories that the config names where no flag does."""
    if loaded.run_directory and not options.save_dir and options.resume in {"auto", "never"}:
        options = replace(options, save_dir=Path(loaded.run_directory))
    if options.init_from is None:
        options = replace(
            options, init_from=entry_of(loaded.config.task).first_weights(loaded.config)
        )
    return options


def _kept(weights: "Source | None", run: Run, origin: Origin) -> str | None:
    """Where the run has its first weights; new ones are put there."""
    if weights is None:
        return run.weights_path()
    from samecurve.run.weights.initial_weights import keep

    keep(weights, run)
    origin.notes.extend(weights.notes)
    return str(weights.path)


def _refuse_finished(origin: Origin, accepted_plan: Plan) -> None:
    """UserError: a new run would begin where nothing is left to train."""
    if origin.run or not origin.has_ended(accepted_plan):
        return
    if origin.step < accepted_plan.steps:
        raise UserError(
            f"{origin.checkpoint} is of a run that stopped early: a new run that begins from it has"
            " nothing left to train",
            "--set train.early_stop.patience=N, beyond what it was, trains on; --init-from begins a"
            " run at step 0 with these weights",
            "--resume",
        )
    raise UserError(
        f"{origin.checkpoint} holds step {origin.step} of {accepted_plan.steps}: a new run that"
        " begins from it has nothing left to train",
        f"--max-steps N, beyond {origin.step}, trains on; --init-from begins a run at step 0 with"
        " these weights",
        "--resume",
    )


def _make_run(
    loaded: LoadedConfig, options: Options, origin: Origin, facts: Facts, accepted_plan: Plan
) -> Run:
    """Its directory, with room for checkpoints.

    UserError: there is no room, or it can't be written.
    """
    run = origin.run
    if run is None and options.save_dir:
        run = Run(options.save_dir)
    home = run.home if run else Path("runs")
    size = checkpoint_bytes(loaded.config, facts)
    check_room(Run(home), size, most_checkpoints(accepted_plan))
    if run is None:
        run = Run(free_name(loaded.name))
    make_home(run.home)
    return run


@contextmanager
def _claimed(run: Run) -> Iterator[Lock]:
    """The run's lock, kept beyond the block; if the block fails, it is released, and a directory in
    which nothing was begun is removed.

    UserError: something can't be written.
    """
    lock = Lock(run)
    try:
        yield lock
    except BaseException as error:
        lock.release()
        remove_unbegun(run.home)
        if not isinstance(error, OSError):
            raise
        raise UserError(
            f"{error.filename or run.home} can't be written: {error.strerror}",
            "another --save-dir, or mend this one",
            "--save-dir",
        ) from None


def _refuse_early(config: Config, machine: Machine, *, measurable: bool) -> Plan:
    """Devices, strategy and sync are refused before any data is read. Returns a plan of these."""
    devices = config.devices.model_copy(update={"memory": None})
    unlimited = config.model_copy(update={"devices": devices})
    return plan(unlimited, machine, _least_facts(measurable=measurable))


def _write(accepted: _Accepted) -> PreparedRun:
    """The run's directory and files, as they are when the ranks start."""
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
        done=origin.has_ended(accepted.plan),
        step=origin.step,
        track=accepted.loaded.config.track,
    )
    if not prepared.done:
        _write_files(accepted)
        _write_journal(accepted, prepared)
    return prepared


def _mend(run: Run) -> int:
    """What an earlier start left half done. Returns the journal's length."""
    for directory in (run.checkpoints, run.logs):
        directory.mkdir(exist_ok=True)
    clear_logs(run.logs)
    sweep(run.checkpoints)
    cut_torn_line(run.journal)
    if not run.journal.exists():
        return 0
    return run.journal.stat().st_size


def _note_other_precision(accepted: _Accepted) -> None:
    """train.amp follows the devices."""
    run, now = accepted.origin.run, accepted.plan.precision
    if run is None or not accepted.loaded.config.train.amp:
        return
    before = run.read_plan().precision
    if before != now:
        accepted.origin.notes.append(
            f"this run computed in {before} until here, and goes on in {now}, which train.amp comes"
            f" to on {accepted.plan.devices[0].name}: another curve; --dtype {before} keeps it"
        )


def _note_lost_lines(run: Run, origin: Origin) -> None:
    """A save waits for its journal, so somebody cut it."""
    if not origin.own or origin.checkpoint is None:
        return
    written = last_step(run.journal)
    if written < origin.step:
        origin.notes.append(
            f"journal.jsonl lacks steps {written + 1} to {origin.step}, which"
            f" {origin.checkpoint.name} holds: what reads it (report, losses) will not know them"
        )


def _attempt(accepted: _Accepted) -> Attempt:
    run, origin, stop_after = accepted.run, accepted.origin, accepted.options.stop_after
    attempt = Attempt(name=new_attempt_name(), run=str(run.home))
    if origin.checkpoint:
        attempt = replace(attempt, resume=str(origin.checkpoint))
    elif accepted.weights and not accepted.base:
        attempt = replace(attempt, weights=str(run.initial))
    if stop_after is not None:
        attempt = replace(attempt, stop_at=origin.step + stop_after)
    return attempt


def _write_files(accepted: _Accepted) -> None:
    run, origin = accepted.run, accepted.origin
    parent = None
    if run.exists():
        parent = run.parent_checkpoint()
    elif origin.checkpoint and not origin.own:
        parent = str(origin.checkpoint)
    if accepted.base:
        write_json(run.base, accepted.base.to_json())
    elif accepted.weights and not run.exists():
        from samecurve.run.weights.initial_weights import publish

        publish(run)
    run.write(
        _keep_task(run, accepted.loaded.config),
        accepted.plan,
        origins=accepted.loaded.origins,
        formulas=accepted.facts.formulas,
        parent_checkpoint=parent,
        weights_path=accepted.weights,
    )


def _keep_task(run: Run, config: Config) -> Config:
    """A class that is kept elsewhere is kept in the run's directory from now on."""
    place = place_of(config.task)
    if place is None or not is_pickled(place.path):
        return config
    if place.path.resolve() != run.task.resolve():
        scratch = run.task.with_name(f"{run.task.name}.part")
        shutil.copyfile(place.path, scratch)
        scratch.replace(run.task)
    values = {**config.model_dump(mode="json"), "task": f"{run.task}:{place.name}"}
    return load(Document(values), Tasks()).config


def _write_journal(accepted: _Accepted, prepared: PreparedRun) -> None:
    run, origin, start_plan = accepted.run, accepted.origin, accepted.plan

    def record(kind: Kind, **values: object) -> None:
        append_event(run.journal, Event(kind, origin.step, values))

    record(
        "planned",
        attempt=prepared.attempt.name,
        run=str(run.home),
        plan=start_plan.to_json(),
        environment=surroundings(start_plan.engine, accepted.machine),
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
        f"from {origin.checkpoint}; batch {plan.global_batch_size}: {plan.reasons['batch']};"
        f" on {counted(plan.num_devices, 'device')}"
    )


def _least_facts(*, measurable: bool) -> Facts:
    """A stand-in that fits anywhere, to try the choices that depend on no model.

    measurable: whether devices can be.
    """
    return Facts(
        samples=1 << 40,
        eval_samples=1,
        tokens_per_sample=1,
        params=1,
        trainable=1,
        blocks=2,
        bytes_per_sample=1,
        flops_per_sample=None,
        coupled=(),
        fingerprint="",
        speeds=Speeds() if measurable else None,
    )
