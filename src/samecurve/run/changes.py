"""Changes between the config of a run and the one it goes on with: refused, or noted."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from samecurve.checkpoint import read_manifest
from samecurve.core.config import flatten
from samecurve.core.config.loading import LoadedConfig
from samecurve.core.config.param_groups import ParamGroup, ParamRules
from samecurve.core.config.sections import Config
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.fixed import has_same_bits
from samecurve.errors import SAME_BITS, UserError
from samecurve.run.directory import Run
from samecurve.run.resume import Origin, kept_defaults, task_of
from samecurve.tasks import Tasks
from samecurve.tasks.user_class import (
    SOURCES,
    Place,
    identity_of,
    is_pickled,
    place_of,
)
from samecurve.tasks.user_class.kept_source import place_of_older, read_kept_source
from samecurve.tasks.user_class.pickled_class import read_header
from samecurve.units import first_and_count

Flat = dict[str, Any]  # a config by dotted keys


def with_kept_defaults(origin: Origin, loaded: LoadedConfig) -> LoadedConfig:
    """The config, with the run's values of settled defaults that no one has set anew.

    A run that is older than the default began with the field's own.
    """
    names = kept_defaults(loaded)
    before = _config_before(origin, loaded.config) if names else {}
    if not before:
        return loaded
    fields = type(loaded.config.model).model_fields
    values = {name: before.get(f"model.{name}", fields[name].get_default()) for name in names}
    return replace(loaded, config=loaded.config.with_values(model=values))


def refuse_changes(origin: Origin, config: Config) -> None:
    """Refuse a changed model or changed data of a run that goes on; note other changes.

    UserError: the model, the data or the optimizer is not what the run began with.
    """
    before = _config_before(origin, config)
    if not before:
        return
    after = _plain(flatten(config))
    if config.train.plan_chooses_bits:  # the run keeps what it began with
        before.pop(SAME_BITS, None)
    _refuse_thawed(origin, before["optimizer.groups"], config)
    free_of_data = (*config.data.indifferent, *config.data.in_fingerprint)
    not_judged = {f"data.{name}" for name in free_of_data}
    changed = [key for key in _changed_keys(before, after) if key not in not_judged]
    fatal = [key for key in changed if _is_model_or_data(key) or key in {"task", "optimizer.name"}]
    if fatal:
        where = origin.checkpoint
        if where is None and origin.run:
            where = origin.run.home
        raise UserError(
            f"this run began with another model or data: {_changes(fatal, before, after)}",
            "the config as it was, or a new run with another --save-dir",
            str(where),
        )
    free = ("devices.", "track.", "train.save_every")  # no curve depends on them
    origin.changes.extend(
        _changes([key], before, after) for key in changed if not key.startswith(free)
    )
    noted = [key for key in changed if not key.startswith(("devices.", "batch.", "track."))]
    if noted:
        changes = _changes(noted, before, after)
        origin.notes.append(f"changed since the run was last saved: {changes}")
    had = has_same_bits(origin.manifest)
    same_bits = had if config.train.plan_chooses_bits else config.train.asks_same_bits
    rows = [row for row in config.features if not {*noted}.isdisjoint(row.keys)]
    if same_bits and any(row.load().compiles_blocks for row in rows):
        how = "compiled" if config.compiles_blocks else "uncompiled"
        origin.notes.append(
            f"{SAME_BITS}: from step {origin.step} on the bits are those of the {how} model, which"
            " rounds in another way"
        )


def refuse_changed_source(origin: Origin, config: Config, facts: Facts) -> None:
    """Note that the source of the task's class has changed since the run was begun.

    UserError: the model has other arrays than the checkpoint.
    """
    place = place_of(config.task)
    if place is None or origin.run is None:
        return
    files = _changed_files(origin.run, place)
    if not files:
        return
    change = f"{first_and_count(files)} changed since this run was started with it"
    before = origin.run.home / SOURCES
    differing = other_arrays(origin.manifest, facts)
    if differing:
        raise UserError(
            f"{change}, and its model has other arrays than {origin.checkpoint}:"
            f" {first_and_count(differing)}",
            f"the source as it was ({before}), or a new run with another --save-dir",
            str(place.path),
        )
    origin.changes.append(change)
    if not is_pickled(place.path):
        before = place_of_older(origin.run.home, origin.step)
        origin.notes.append(
            f"{change}: it goes on with the new code from step {origin.step}; {before} has the"
            " source as it was, and another --save-dir begins anew"
        )
        return
    origin.notes.append(
        f"{change}: it goes on with the new code from step {origin.step}; another --save-dir begins"
        " anew"
    )


def refuse_without_effect(origin: Origin) -> None:
    """UserError: nothing is left to train, so that what was changed can have no effect."""
    if origin.run and origin.changes:
        raise UserError(
            f"{origin.run.home} is trained to its end, so that a change can have no effect:"
            f" {'; '.join(origin.changes)}",
            "another --save-dir begins anew with it; --max-steps N, beyond"
            f" {origin.step}, trains on; or what the run was trained with, as it was",
            "--save-dir",
        )


def _changed_files(run: Run, place: Place) -> list[str]:
    """The files of the class that changed since the run was started; of a pickled one, its origin.

    Empty also where the run has kept no source: it was begun by an older version.
    """
    if is_pickled(place.path):
        if not run.task.is_file() or read_header(run.task).digest == read_header(place.path).digest:
            return []
        return [read_header(place.path).origin]
    kept = read_kept_source(run.home)
    if kept is None:
        return []
    root = place.path.parent
    return [str(root / name) for name in kept.changes(place)]


def refuse_other_model(run: Run, checkpoint: Path, facts: Facts) -> None:
    """UserError: the run's config is of another model than its checkpoint. A run may come from
    anywhere, and its model may take all of the memory.
    """
    differing = other_arrays(read_manifest(checkpoint), facts)
    if differing:
        raise UserError(
            f"the config of {run.home} is of another model than {checkpoint.name}:"
            f" {first_and_count(differing)}",
            "the run's config.yaml and checkpoints as they were written",
            "RUN",
        )


def other_arrays(manifest: Mapping[str, Any], facts: Facts) -> list[str]:
    """The arrays of the model that are of another shape in a checkpoint, or not in it."""
    if facts.model.frozen_base or not facts.model.arrays:
        return []
    saved = {
        name.removeprefix("model/"): tuple(array["shape"])
        for name, array in manifest.get("arrays", {}).items()
        if name.startswith("model/")
    }
    if not saved:
        return []
    free = {*facts.model.buffers, *facts.model.aliases}
    differing = [
        f"{name} {list(saved[name])}, here {list(shape)}"
        for name, shape in facts.model.arrays.items()
        if name in saved and saved[name] != shape
    ]
    missing = [
        f"{name} is new"
        for name, shape in facts.model.arrays.items()
        if name not in saved and name not in free and 0 not in shape
    ]
    return [
        *differing,
        *missing,
        *(f"{name} is gone" for name in saved if name not in facts.model.arrays),
    ]


def _config_before(origin: Origin, config: Config) -> Flat:
    """The run's config at its last save or, if there is none, at its start; {}: a new run.

    config: the one to compare with; if its task is another, the run's task is not imported
    """
    before: Flat = origin.manifest.get("config", {})
    if not before and origin.run:
        before = {"task": task_of(origin.run)}
        if before["task"] == identity_of(config.task):
            before = flatten(origin.run.read_config(Tasks()))
    if not before:
        return {}
    return _plain({"optimizer.groups": [], **before})  # older ones have no groups


def _changed_keys(before: Flat, after: Flat) -> list[str]:
    """Keys whose values differ; a key that only one config has counts for model and data."""
    changed = []
    for key in {**after, **before}:
        is_in_both = key in before and key in after
        if (is_in_both or _is_model_or_data(key)) and before.get(key) != after.get(key):
            changed.append(key)
    return changed


def _is_model_or_data(key: str) -> bool:
    return key.startswith(("model.", "data."))


def _refuse_thawed(origin: Origin, before: list[Any], config: Config) -> None:
    """UserError: parameters were frozen and no longer are, or the other way round.

    The optimizer would have no state, or useless state, for them.
    """
    names = [
        name.removeprefix("model/")
        for name in origin.manifest.get("arrays", {})
        if name.startswith("model/")
    ]
    then = ParamRules([ParamGroup(**group) for group in before], 0.0)
    now = config.optimizer.rules
    changed = [name for name in names if then.is_frozen(name) != now.is_frozen(name)]
    if changed:
        how = "frozen" if then.is_frozen(changed[0]) else "trained"
        raise UserError(
            f"optimizer.groups: {first_and_count(changed)} was {how} when this run was last saved,"
            " and the other way round it would have no fitting optimizer state",
            "the same parameters frozen as before, or a new run with another --save-dir:"
            " --init-from RUN begins with these weights",
            str(origin.checkpoint),
        )


def _plain(values: Flat) -> Flat:
    """The values with lists in place of tuples, as in JSON, and the task's identity."""
    lists = {key: list(value) for key, value in values.items() if isinstance(value, tuple)}
    return {**values, **lists, "task": identity_of(values.get("task", "language"))}


def _changes(keys: list[str], before: Flat, after: Flat) -> str:
    return ", ".join(f"{key} {before.get(key)} -> {after.get(key)}" for key in keys)
