"""A draft of a run: a base with the values of a form, checked and loaded.

All that a request about a new run asks begins with a draft. What is wrong is collected, each error
with the key of the field beside which it is shown.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from samecurve.run.trust import check_trusted
from samecurve.seam import (
    Document,
    InvalidConfigError,
    LoadedConfig,
    SamecurveError,
    Tasks,
    UserError,
    join_key,
    load_document,
)
from samecurve_products.page.form.bases import Base, BaseName, Bases
from samecurve_products.page.form.fields import FormFields, form_fields
from samecurve_products.page.form.places import check_places
from samecurve_products.page.form.task_places import check_task
from samecurve_products.page.form.values import (
    apply_values,
    check_values,
    extra_keys,
    is_given,
    read_values,
)

# flags that errors of the plan name as their place
_KEYS_OF_FLAGS = {
    "--gpus": "devices.use",
    "--devices": "devices.use",
    "--strategy": "devices.strategy",
    "--sync-backend": "devices.sync",
    "--batch-size": "batch.per_device",
    "--grad-accum": "batch.accumulate",
    "--global-batch": "batch.samples",
    "--max-steps": "train.steps",
    "--exact": "train.exact",
    "--no-exact": "train.exact",
}
_WORD = re.compile(r"[A-Za-z_][\w]*(?:\.[A-Za-z_]\w*)*")


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A base with the values of a form.

    document: the whole config as plain values
    changes: the values that differ from the base's
    loaded: None: it can't be loaded, and errors say why
    """

    base: Base
    document: Document
    fields: FormFields
    changes: Mapping[str, Any]
    loaded: LoadedConfig | None
    errors: tuple[UserError, ...] = ()

    def key_of(self, error: SamecurveError) -> str:
        """The field that an error belongs to; '': none."""
        return key_of(error, self.document, self.fields)


def make_draft(
    bases: Bases,
    name: BaseName,
    values: object,
    *,
    enter: Callable[[Path], None],
    look_at: Callable[[object], None],
) -> Draft:
    """Make a draft of what the browser sent.

    enter: is called with the folder where paths begin, before any path is looked at
    look_at: is called with a task that may be looked at, before it is

    UserError: the base can't be read, or its task is not known, so that there are no fields.
    """
    base = bases.open(name)
    document, home, roots = base.document, base.home, bases.roots
    checked = check_values(values)
    if "task" in checked and checked["task"] != document.value.get("task"):
        document.set("task", checked["task"], "task")
        document.value["model"], document.value["data"] = {}, {}  # those of another task
    task = document.value.get("task", "language")
    enter(home)
    if base.run is not None:
        check_trusted(base.run, trust=False, where="base")
    check_task(task, roots, home)
    look_at(task)
    if not Tasks().knows(task):
        load_document(document, Tasks())  # says what tasks there are
    engine = checked.get("engine", document.value.get("engine", "torch"))
    fields = form_fields(str(task), str(engine), {})
    fields = form_fields(str(task), str(engine), extra_keys(document, fields))
    known = {key: value for key, value in checked.items() if key != "task"}
    read = read_values(known, fields)
    idle = _idle(document, read, fields)
    changes = apply_values(document, {key: read[key] for key in read.keys() - idle}, fields)
    if "task" in checked and document.origins.get(("task",)) == "task":
        changes = {"task": task, **changes}
    draft = Draft(base=base, document=document, fields=fields, changes=changes, loaded=None)
    missing = _missing(base, document)
    errors = [*missing, *check_places(document.value, roots, home)]
    try:
        loaded = load_document(document, Tasks(), base.name)
    except UserError as error:
        places = {one.where for one in missing}
        others = [one for one in each([error]) if draft.key_of(one) not in places]
        return replace(draft, errors=tuple(each([*errors, *others])))
    if base.converted:
        errors += base.converted.unresolved(document)
    return replace(draft, loaded=loaded, errors=tuple(each(errors)))


def _idle(document: Document, values: Mapping[str, Any], fields: FormFields) -> set[str]:
    """Values that change nothing: defaults of keys that the base does not give.

    A default may follow from another value, and then the field's own default is a change.
    """
    idle = {
        key
        for key, value in values.items()
        if value == fields.by_key[key].default and not is_given(document, key)
    }
    if not idle:
        return idle
    configs = []
    for chosen in (values, {key: values[key] for key in values.keys() - idle}):
        copy = Document(deepcopy(document.value), dict(document.origins))
        apply_values(copy, chosen, fields)
        try:
            configs.append(load_document(copy, Tasks()).config)
        except UserError:
            return set()
    return idle if configs[0] == configs[1] else set()


def _missing(base: Base, document: Document) -> list[UserError]:
    """The keys of a preset that the user still has to give."""
    errors = []
    for key in base.needs:
        section, _, name = key.partition(".")
        values = document.value.get(section)
        if not (isinstance(values, dict) and values.get(name)):
            words = f"{key}: this preset needs it"
            errors.append(UserError(words, "a folder or file below the page's folders", key))
    return errors


def each(errors: Iterable[SamecurveError]) -> Iterable[UserError]:
    """The single errors, those within an InvalidConfigError too, each once."""
    seen: set[str] = set()
    for error in errors:
        inner = error.errors if isinstance(error, InvalidConfigError) else (error,)
        for one in inner:
            if str(one) in seen:
                continue
            seen.add(str(one))
            if isinstance(one, UserError):
                yield one
            else:
                yield UserError(one.cause, one.remedy, one.where)


def key_of(error: SamecurveError, document: Document, fields: FormFields) -> str:
    """The field that an error belongs to: the one at its place, or the first that it names."""
    known, where = fields.by_key, error.where
    if where in known:
        return where
    if where in _KEYS_OF_FLAGS:
        return _KEYS_OF_FLAGS[where]
    places = {place: join_key(key) for key, place in document.origins.items()}
    at = places.get(where, where if where in {"model", "data"} else "")
    if at in known:
        return at
    named = _WORD.findall(error.cause)
    for word in named:
        if word in known:
            return str(word)
    section = at or (named[0] if named else "")
    for word in named:  # a section's own check names its fields
        if f"{section}.{word}" in known:
            return f"{section}.{word}"
    return ""


def error_json(error: SamecurveError, key: str) -> dict[str, str]:
    """An error as the browser gets it."""
    values = {"cause": error.cause, "remedy": error.remedy, "where": error.where}
    return {"key": key, **values} if key else values
