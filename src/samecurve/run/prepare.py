"""Everything before the first rank starts: which run directory, which checkpoint, which plan.

Nothing is written until all of it is accepted.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from samecurve.checkpoint.store import sweep
from samecurve.core.config.sections import LoadedConfig, Track
from samecurve.core.events import Event
from samecurve.core.planning.facts import Facts, Measure, Speeds
from samecurve.core.planning.machine import Machine
from samecurve.core.planning.plan import Plan, plan
from samecurve.errors import UserError
from samecurve.observe.journal import append_event, cut_torn_line, last_step
from samecurve.probe import probe
from samecurve.run.attempt import Attempt, new_attempt_name
from samecurve.run.describe import describe
from samecurve.run.directory import Run
from samecurve.run.init_weights import keep, publish, weights_for
from samecurve.run.lock import Lock
from samecurve.run.logs import clear_logs
from samecurve.run.naming import free_name
from samecurve.run.preconditions import check_port, check_room, check_trackers, leave, make
from samecurve.run.provenance import surroundings
from samecurve.run.resume import (
    Options,
    Origin,
    find_origin,
    fixed_of,
    refuse_changes,
    set_later_aside,
)


@dataclass
class PreparedRun:
    """A run ready to start, its lock held.

    begin: where its journal ended before. done: nothing is left to train. track: who is told of it.
    """

    run: Run
    plan: Plan
    attempt: Attempt
    lock: Lock
    begin: int
    done: bool
    track: Track


def make_plan(
    loaded: LoadedConfig, facts: Facts | None = None, measure: Measure | None = None
) -> tuple[Plan, Facts]:
    """What `samecurve plan` shows: a run from the start. facts, measure: as prepare()."""
    machine, facts = probe(), facts or describe(loaded.config)
    facts = measure(loaded.config, machine, facts) if measure else facts
    return plan(loaded.config, machine, facts), facts


def prepare(
    loaded: LoadedConfig,
    options: Options,
    facts: Facts | None = None,
    machine: Machine | None = None,
    measure: Measure | None = None,
) -> PreparedRun:
    """facts: if they were measured.

    machine: another than this one by itself. measure: what is to be measured once all else is
    accepted. UserError: anything that can't be honoured; the disk is then as it was before.
    """
    machine = machine or probe()
    if loaded.run_directory and not options.save_dir and options.resume in {"auto", "never"}:
        options = replace(options, save_dir=Path(loaded.run_directory))
    unlimited = loaded.config.model_copy(
        update={"devices": loaded.config.devices.model_copy(update={"memory": None})}
    )
    plan(
        unlimited, machine, _least_facts(measure is not None)
    )  # devices, strategy and sync are refused before any data is read
    check_trackers(loaded.config.track)
    facts = facts or describe(loaded.config)
    origin = find_origin(loaded, options)
    fixed = fixed_of(origin, options)
    refuse_changes(origin, loaded.config)
    facts = measure(loaded.config, machine, facts) if measure else facts
    made = plan(loaded.config, machine, facts, fixed)
    weights = weights_for(
        origin.run,
        origin.own,
        origin.checkpoint is not None,
        options.init_from,
        loaded.config,
        facts,
        origin.words,
    )
    check_port(loaded.config.devices.port)
    check_room(
        origin.run.home if origin.run else options.save_dir or Path("runs"), loaded.config, facts
    )
    home = origin.run or Run(options.save_dir or free_name(loaded.name))
    make(home.home)
    lock = Lock(home)
    try:
        if weights:
            keep(weights, home)
            origin.words.extend(weights.words)
        return _begin(
            home,
            lock,
            loaded,
            options,
            origin,
            made,
            facts,
            machine,
            str(weights.path) if weights else home.weights(),
        )
    except OSError as error:
        lock.release()
        leave(home.home)
        raise UserError(
            f"{error.filename or home.home} can't be written: {error.strerror}",
            "another --save-dir, or mend this one",
            "--save-dir",
        ) from None
    except BaseException:
        lock.release()
        leave(home.home)
        raise


def _begin(
    run: Run,
    lock: Lock,
    loaded: LoadedConfig,
    options: Options,
    origin: Origin,
    made: Plan,
    facts: Facts,
    machine: Machine,
    weights: str | None,
) -> PreparedRun:
    for directory in (run.checkpoints, run.logs):
        directory.mkdir(exist_ok=True)
    clear_logs(run.logs)
    sweep(run.checkpoints)
    cut_torn_line(run.journal)
    begin = run.journal.stat().st_size if run.journal.exists() else 0
    if (
        origin.own and origin.checkpoint and (written := last_step(run.journal)) < origin.step
    ):  # a save waits for its journal, so somebody cut it
        origin.words.append(
            f"journal.jsonl lacks steps {written + 1} to {origin.step}, which"
            f" {origin.checkpoint.name} holds: what reads it (report, losses) will not know them"
        )
    done = origin.checkpoint is not None and origin.step >= made.steps
    stop_at = None if options.stop_after is None else origin.step + options.stop_after
    attempt = Attempt(
        new_attempt_name(),
        str(run.home),
        str(origin.checkpoint) if origin.checkpoint else None,
        stop_at,
        weights=str(run.initial) if weights and not origin.checkpoint else None,
    )
    if done:
        return PreparedRun(run, made, attempt, lock, begin, done, loaded.config.track)
    began = (
        run.began()
        if run.exists()
        else str(origin.checkpoint)
        if origin.checkpoint and not origin.own
        else None
    )
    if weights and not run.exists():
        publish(run)
    run.write(loaded.config, made, loaded.origins, facts.formulas, began, weights)
    append_event(
        run.journal,
        Event(
            "planned",
            origin.step,
            {
                "attempt": attempt.name,
                "run": str(run.home),
                "plan": made.to_json(),
                "environment": surroundings(made.engine, machine),
            },
        ),
    )
    if origin.own and origin.run:
        set_later_aside(run, origin)
    for word in (*loaded.notes, *origin.words):
        append_event(run.journal, Event("warned", origin.step, {"text": word}))
    if begin or origin.checkpoint:
        append_event(
            run.journal,
            Event(
                "resumed", origin.step, {"attempt": attempt.name, "text": _resumed(origin, made)}
            ),
        )
    return PreparedRun(run, made, attempt, lock, begin, done, loaded.config.track)


def _resumed(origin: Origin, made: Plan) -> str:
    if origin.checkpoint is None:
        return "nothing was saved before: from the start"
    return (
        f"from {origin.checkpoint}; batch {made.global_batch_size}: {made.reasons['batch']}; on {made.num_devices}"
        f" device{'s' if made.num_devices > 1 else ''}"
    )


def _least_facts(measurable: bool) -> Facts:
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
