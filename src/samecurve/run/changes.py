"""Changes between the config of a run and the one it goes on with: refused, or noted."""

from typing import Any

from samecurve.core.config.param_groups import ParamGroup, ParamRules
from samecurve.core.config.section import flatten
from samecurve.core.config.sections import Config
from samecurve.errors import UserError
from samecurve.run.resume import Origin, task_of
from samecurve.tasks import Tasks
from samecurve.tasks.user_class.class_place import identity_of
from samecurve.units import first_and_count

Flat = dict[str, Any]  # a config by dotted keys


def refuse_changes(origin: Origin, config: Config) -> None:
    """Refuse a changed model or changed data of a run that goes on; note other changes.

    UserError: the model, the data or the optimizer is not what the run began with.
    """
    before = _config_before(origin, config)
    if not before:
        return
    after = _plain(flatten(config))
    _refuse_thawed(origin, before["optimizer.groups"], config)
    indifferent = {f"data.{name}" for name in config.data.indifferent}
    changed = [key for key in _changed_keys(before, after) if key not in indifferent]
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
    noted = [key for key in changed if not key.startswith(("devices.", "batch.", "track."))]
    if noted:
        changes = _changes(noted, before, after)
        origin.notes.append(f"changed since the run was last saved: {changes}")


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
