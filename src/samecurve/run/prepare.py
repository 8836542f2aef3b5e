"""The start of a run, up to its first rank: the run directory, the checkpoint, the plan.

Nothing is written until all of it is accepted.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from samecurve.core.config.loading import LoadedConfig
from samecurve.core.config.sections import Config
from samecurve.core.planning.facts import Facts, Measure
from samecurve.core.planning.layout import Layout
from samecurve.core.planning.machine import Machine, has_open_ranks
from samecurve.core.planning.plan import Plan
from samecurve.core.planning.planner import plan
from samecurve.errors import Refusals, UserError
from samecurve.probe import network_note, probe
from samecurve.processes import ForkServer
from samecurve.run.describe import describe
from samecurve.run.directory import Lock, Run, unwritable
from samecurve.run.preconditions import (
    check_before_facts,
    check_open_files,
    check_port,
    check_room,
    check_trackers,
    checkpoint_bytes,
    make_home,
    most_checkpoints,
    remove_unbegun,
    without_room_for_saves,
)
from samecurve.run.resume import Options, Origin, find_origin, fixed_of
from samecurve.run.start_files import AcceptedStart, PreparedRun, write_start
from samecurve.run.warm_start import WarmStart
from samecurve.tasks import entry_of

if TYPE_CHECKING:  # most runs begin from no weights, and have no store
    from samecurve.run.remote.claimed import Claim
    from samecurve.run.weights.base_files import Base
    from samecurve.run.weights.initial_weights import Source


def make_plan(
    loaded: LoadedConfig,
    facts: Facts | None = None,
    measure: Measure | None = None,
    *,
    server: ForkServer | None = None,
) -> tuple[Plan, Facts]:
    """The plan and the facts of a run from its start. facts, measure: as StartRequest.

    server: forks the process that describes the task; None: it is started
    """
    machine = probe()
    _accepted_layout(loaded.config, machine, can_measure=measure is not None, trains=False)
    facts = facts or describe(loaded.config, server)
    if measure:
        facts = measure(loaded.config, machine, facts)
    return plan(loaded.config, machine, facts), facts


@dataclass(frozen=True, kw_only=True)
class StartRequest:
    """What a command asks of the start of a run.

    facts: of the task; None: they are obtained
    machine: None: this one
    measure: measures what the plan goes by, once all else is accepted
    warm_start: imports the engine meanwhile
    kept_facts: as describe() takes it
    """

    loaded: LoadedConfig
    options: Options
    facts: Facts | None = None
    machine: Machine | None = None
    measure: Measure | None = None
    warm_start: WarmStart | None = None
    kept_facts: Path | None = None


def prepare(request: StartRequest) -> PreparedRun:
    """Decide everything, then write what the ranks read.

    UserError: the start can't be done as asked; the disk is then as it was before.
    """
    options = _with_places_of(request.loaded, request.options)
    with _places_at_hand(request.loaded, options) as (options, claim):
        prepared = _prepare(replace(request, options=options), claim)
    return replace(prepared, claim=claim)


def _prepare(request: StartRequest, claim: "Claim | None") -> PreparedRun:
    """prepare(), with everything that options name on this machine."""
    loaded, options, measure = request.loaded, request.options, request.measure
    machine, warm_start = request.machine or probe(), request.warm_start
    config = loaded.config
    layout = _accepted_layout(config, machine, can_measure=measure is not None)
    if warm_start:
        may_grow = _may_grow(config, machine)
        warm_start.expect(layout, entry_of(config.task).libraries, may_grow=may_grow)
    origin = find_origin(loaded, options)
    _note_mirror(origin, claim)
    loaded = _with_kept_defaults(loaded, origin)
    config = loaded.config
    server = warm_start.server if warm_start else None
    facts = request.facts or describe(config, server, kept=request.kept_facts)
    fixed = fixed_of(origin, options)
    _refuse_changes(origin, config, facts)
    if measure:
        facts = measure(config, machine, facts)
    accepted_plan = plan(config, machine, facts, fixed)
    if warm_start and accepted_plan.layout.is_one_process:  # this process, which wants the cores
        warm_start.stop()
    base, weights = _choose_weights(origin, options, config, facts)
    check_port(config.devices.port)
    if machine.started == 1:
        check_open_files(accepted_plan.layout.world_size)
    _refuse_finished(origin, accepted_plan)
    has_copy = weights is not None or (origin.run is not None and origin.run.initial.is_dir())
    run, accepted_plan = _make_run(loaded, options, origin, facts, accepted_plan)
    with _claimed(run, options.group) as lock:
        _refuse_begun_meanwhile(run, origin)
        accepted = AcceptedStart(
            run=run,
            lock=lock,
            loaded=loaded,
            options=options,
            origin=origin,
            plan=accepted_plan,
            facts=facts,
            machine=machine,
            weights=base.path if base and not has_copy else _kept(weights, run, origin),
            has_copy=has_copy,
            base=base,
            mirrored=claim.mirrored if claim else None,
        )
        return write_start(accepted)


def _note_mirror(origin: Origin, claim: "Claim | None") -> None:
    """Note what the mirror of a run that goes on has said, or that it has none any more."""
    if claim:
        origin.notes[:0] = claim.notes
    elif origin.run and origin.run.remote.is_file():
        from samecurve.run.remote.stored_run import note_unmirrored

        origin.notes += note_unmirrored(origin.run)


def _may_grow(config: Config, machine: Machine) -> bool:
    """Whether the plan may take more CPU ranks than the config names."""
    is_open = has_open_ranks(config, machine) and machine.cores > 1
    return is_open and config.train.may_have_same_bits and bool(config.batch.samples)


@contextmanager
def _places_at_hand(
    loaded: LoadedConfig, options: Options
) -> Iterator[tuple[Options, "Claim | None"]]:
    """The options, with what they name in a store brought to this machine; and the claim on the
    place where the run is mirrored.
    """
    if not (options.save_url or options.init_url or "://" in options.resume):
        yield options, None
        return
    from samecurve.run.remote.places import places_at_hand

    with places_at_hand(options, loaded.config.track.store_patience) as brought:
        yield brought


def _with_kept_defaults(loaded: LoadedConfig, origin: Origin) -> LoadedConfig:
    """The config, with the defaults that a run which goes on began with."""
    if not (origin.run or origin.manifest):
        return loaded
    from samecurve.run.changes import with_kept_defaults

    return with_kept_defaults(origin, loaded)


def _refuse_changes(origin: Origin, config: Config, facts: Facts) -> None:
    """Note what has changed since the run was last saved.

    UserError: a run can't go on with such a change.
    """
    if not (origin.run or origin.manifest):  # a new run has nothing to differ from
        return
    from samecurve.run.changes import refuse_changed_source, refuse_changes

    refuse_changes(origin, config)
    refuse_changed_source(origin, config, facts)


def _refuse_begun_meanwhile(run: Run, origin: Origin) -> None:
    """UserError: the directory was empty, and another start has begun a run there since."""
    if origin.run is None and run.exists():
        raise UserError(
            f"{run.home} was begun by another start at the same time",
            "another --save-dir; or the same command again, which goes on with that run",
            "--save-dir",
        )


def _accepted_layout(
    config: Config, machine: Machine, *, can_measure: bool, trains: bool = True
) -> Layout:
    """The layout as far as it is known before the facts.

    trains: a run follows, which needs its trackers' libraries.

    UserError: the machine's refusals, the trackers' and, if there are any, those of the task's
    files, all at once.
    """
    refusals = Refusals()
    layout = None
    with refusals.collected():
        layout = check_before_facts(config, machine, can_measure=can_measure)
    if trains:
        refusals.collect(check_trackers, config.track)
    if refusals:  # else describe() looks at the files
        refusals.collect(entry_of(config.task).data_stamp, config)
    refusals.raise_any()
    assert layout is not None
    return layout


def _with_places_of(loaded: LoadedConfig, options: Options) -> Options:
    """The options, with the directories that the config names where no flag does."""
    has_place = options.save_dir or options.save_url
    if loaded.run_directory and not has_place and options.resume in {"auto", "never"}:
        options = replace(options, save_dir=Path(loaded.run_directory))
    if options.init_from is None and options.init_url is None:
        options = replace(
            options, init_from=entry_of(loaded.config.task).first_weights(loaded.config)
        )
    return options


def _choose_weights(
    origin: Origin, options: Options, config: Config, facts: Facts
) -> "tuple[Base | None, Source | None]":
    """The frozen base, and the first weights or the adapter to copy; None: there is none.

    UserError: the weights don't fit the model, or are not those that the run began with.
    """
    own = entry_of(config.task).first_weights(config)
    init_from, is_given = options.init_from, options.init_from not in {None, own}
    if facts.model.frozen_base or is_given:
        from samecurve.run.weights.first_adapter import choose_adapter

        adapter = choose_adapter(origin, init_from if is_given else None, config, facts)
    if facts.model.frozen_base:
        from samecurve.run.weights.base_files import choose_base

        has_adapter = adapter or (origin.run and origin.run.initial.is_dir())
        return choose_base(origin, own if has_adapter else init_from, config, facts), adapter
    if init_from or (origin.run and origin.run.weights_path()):
        from samecurve.run.weights.initial_weights import choose_initial_weights

        return None, choose_initial_weights(origin, init_from, config, facts)
    return None, None


def _kept(weights: "Source | None", run: Run, origin: Origin) -> str | None:
    """The path of the run's first weights; new weights are copied into the run."""
    if weights is None:
        return run.weights_path()
    from samecurve.run.weights.initial_weights import keep

    keep(weights, run)
    origin.notes.extend(weights.notes)
    return str(weights.path)


def _refuse_finished(origin: Origin, accepted_plan: Plan) -> None:
    """UserError: nothing is left to train, and something else is asked for.

    That is a new run that would begin here, or a changed config or source.
    """
    if not origin.has_ended(accepted_plan):
        return
    if origin.run:
        from samecurve.run.changes import refuse_without_effect

        refuse_without_effect(origin)
        return
    if origin.step < accepted_plan.steps:
        raise UserError(
            f"{origin.checkpoint} is of a run that stopped early: a new run that begins from it has"
            " nothing left to train",
            f"{accepted_plan.to_go_on}, beyond what it was, trains on; --init-from begins a run at"
            " step 0 with these weights",
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
) -> tuple[Run, Plan]:
    """The run's directory, made where there is none, with room for checkpoints; and the plan.

    UserError: there is no room, or it can't be written.
    """
    run = origin.run
    if run is None and options.save_dir:
        run = Run(options.save_dir)
    home = run.home if run else Path("runs")
    size = checkpoint_bytes(loaded.config, facts)
    accepted_plan, line = without_room_for_saves(Run(home), size, accepted_plan)
    origin.notes.extend([line] if line else [])
    note = network_note(home)
    origin.notes.extend([f"{note[0]}. Remedy: {note[1]}"] if note else [])
    check_room(Run(home), size, most_checkpoints(accepted_plan))
    if run is None:
        from samecurve.run.run_names import free_name

        run = Run(free_name(loaded.name))
    make_home(run.home)
    return run, accepted_plan


@contextmanager
def _claimed(run: Run, group: str) -> Iterator[Lock]:
    """The run's lock, kept beyond the block; if the block fails, it is released, and a directory in
    which nothing was begun is removed.

    UserError: something can't be written.
    """
    lock = Lock(run, group)
    try:
        yield lock
    except BaseException as error:
        try:
            with suppress(OSError):  # the disk that has failed
                remove_unbegun(run.home)
        finally:
            lock.release()
        if not isinstance(error, OSError):
            raise
        raise unwritable(error, run.home) from None
