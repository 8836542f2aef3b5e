"""Loading: a document becomes a config with the fields of its task.

All faults are reported at once, each with its place, in the words of the user's document.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast, get_args

from pydantic import BaseModel, ValidationError, create_model

from samecurve.core.config import Section
from samecurve.core.config.document import Document, Key, join_key, suggest
from samecurve.core.config.sections import Config, DataSection
from samecurve.core.feature_list import ListedFeature, listed, listed_and_installed
from samecurve.errors import MOST_ERRORS, InvalidConfigError, UserError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

DEFAULT_TASK = "language"
SEE_TABLE = "`samecurve schema --table` says what each key takes"
# fields of other programs' configs that the chosen task may lack, and the task that has them
_EXPERTS = ("a mixture of experts", "huggingface")
_LATENT = ("latent attention", "huggingface")
_MAMBA = ("Mamba layers", "huggingface")
_PARTS = {
    "model.num_experts": _EXPERTS,
    "model.experts_per_tok": _EXPERTS,
    "model.shared_expert_enabled": _EXPERTS,
    "model.kv_latent_dim": _LATENT,
    "model.q_latent_dim": _LATENT,
    "model.d_rope": _LATENT,
    "model.mamba_layers": _MAMBA,
    "model.mamba2_": _MAMBA,
    "model.mamba3_": ("Mamba-3 layers", ""),
    "model.arch": ("a vision model", "vision"),
    "model.cssm": ("a vision model", "vision"),
    "data.mode": ("sensor channels", "timeseries"),
}
_SERVED_BY = {
    "huggingface": "task huggingface has it, under its library's names (docs/huggingface.md); ",
    "vision": "task vision has it: -f models/cssm.yaml (docs/vision.md); ",
    "timeseries": "task timeseries has it: -f models/har.yaml (docs/timeseries.md); ",
}
USER_TASK = "your own: path/to/file.py:MyTask (docs/tasks.md)"
USER_TASK_HINT = "a user task does it today: task: FILE.py:CLASS (docs/tasks.md)"


@dataclass(frozen=True)
class TaskSections:
    """The config sections that a task brings."""

    model: type[Section]
    data: type[DataSection]


class Registry(Protocol):
    """The known tasks and their config fields. Nothing here imports an engine."""

    def names(self) -> tuple[str, ...]: ...
    def knows(self, task: str) -> bool: ...
    def sections(self, task: str) -> TaskSections: ...


@dataclass(frozen=True)
class LoadedConfig:
    """A config as it was read.

    origins: where each dotted key that was given came from
    notes: lines for the user on how the config was read
    run_directory: the directory for the run that another tool's config names
    """

    config: Config
    name: str
    origins: Mapping[str, str]
    notes: tuple[str, ...] = ()
    run_directory: str | None = None


def load_document(document: Document, registry: Registry, name: str = "run") -> LoadedConfig:
    """The config of a document that a user wrote, with the defaults that follow from its values.

    InvalidConfigError, UserError: as load_of_run().
    """
    loaded = load_of_run(document, registry, name)
    return replace(loaded, config=loaded.config.with_settled_defaults())


def load_of_run(document: Document, registry: Registry, name: str = "run") -> LoadedConfig:
    """The config of a document that the program wrote, which names what the run began with.

    A value that an older version did not write is the field's own default.

    InvalidConfigError: the list of all faults, each with its place.
    """
    notes = _replace_old_values(document)
    task = document.value.get("task", DEFAULT_TASK)
    if isinstance(task, str) and not registry.knows(task) and registry.knows(task.lower()):
        task = task.lower()
    if not registry.knows(task):
        known = f"tasks: {', '.join(registry.names())}"
        raise UserError(
            f"task: {task} is not a task",
            suggest(str(task), registry.names()) or f"{known}; {USER_TASK}",
            document.origin_of(("task",)),
        )
    fields, rows = registry.sections(task), _features_for(document)
    try:
        kind = config_class(task, fields, rows, _named(document, rows))
        config = kind.model_validate({"model": {}, "data": {}, **document.value, "task": task})
    except ValidationError as error:
        faults = _of_one_form(error.errors(include_url=False))
        errors = [_explain_fault(fault, document, fields) for fault in faults[:MOST_ERRORS]]
        raise InvalidConfigError(errors, len(faults) - len(errors)) from None
    return LoadedConfig(
        config,
        name,
        {
            join_key(key): place
            for key, place in document.origins.items()
            if not isinstance(_at(document.value, key), dict)
        },
        notes,
    )


def _replace_old_values(document: Document) -> tuple[str, ...]:
    """Replace values that only earlier versions knew. Returns a line for each."""
    exact = _at(document.value, ("train", "exact"))
    if not isinstance(exact, str) or exact.lower() != "measured":
        return ()
    document.set("train.exact", "auto", document.origin_of(("train", "exact")))
    return ("train.exact: measured is read as auto: no steps are timed before a run any more",)


def _features_for(document: Document) -> tuple[ListedFeature, ...]:
    """The features whose keys a document may have. Other packages' are looked for only where it has
    a key that is none of ours.
    """
    rows = listed()
    for name, values in document.value.items():
        section = _section_class(name)
        if section is None or not isinstance(values, dict):
            continue
        ours = {key for row in rows if row.section == name for key in row.defaults}
        if values.keys() - ours - section.model_fields.keys():
            return listed_and_installed()
    return rows


def _named(document: Document, rows: tuple[ListedFeature, ...]) -> tuple[ListedFeature, ...]:
    """The features of which a document has a value that is no default."""
    sections = {name: values for name, values in document.value.items() if isinstance(values, dict)}
    return tuple(row for row in rows if row.is_named(sections.get(row.section, {})))


def _section_class(name: str) -> type[Section] | None:
    """The class of a section that no task brings, without the features' fields."""
    field = Config.model_fields.get(name)
    kind = field.annotation if field else None
    if isinstance(kind, type) and issubclass(kind, Section) and name not in {"model", "data"}:
        return kind
    return None


@lru_cache(maxsize=16)  # building one takes longer than loading a config with it
def config_class(
    task: str,
    fields: TaskSections,
    rows: tuple[ListedFeature, ...] = (),
    named: tuple[ListedFeature, ...] | None = None,
) -> type[Config]:
    """The class of a task's configs.

    rows: the features; of those that are not named the config has the defaults, and no feature is
        imported for that
    named: None: all of them
    """
    task_fields: dict[str, Any] = {
        "task": (Literal[task], task),
        "model": (fields.model, ...),
        "data": (fields.data, ...),
    }
    for name in dict.fromkeys(row.section for row in rows):
        section = _with_features(name, rows, rows if named is None else named)
        task_fields[name] = (section, section.model_construct())  # nothing is checked yet
    config = create_model(f"{task.capitalize()}Config", __base__=Config, **task_fields)
    config.features = rows
    return config


def _with_features(
    name: str, rows: tuple[ListedFeature, ...], named: tuple[ListedFeature, ...]
) -> type[Section]:
    """A section with the features' fields."""
    base = _section_class(name)
    assert base is not None, f"a section {name}"
    fields: dict[str, Any] = {}
    for row in rows:
        if row.section != name or not row.defaults:
            continue
        if row not in named:
            fields |= {key: (Any, default) for key, default in row.defaults.items()}
            continue
        own = row.load().fields
        assert own is not None
        fields |= {key: (field.annotation, field) for key, field in own.model_fields.items()}
    section = create_model(base.__name__, __base__=base, **fields)
    section.__doc__ = base.__doc__
    return cast("type[Section]", section)


def _of_one_form(faults: "list[ErrorDetails]") -> "list[ErrorDetails]":
    """The faults of the form that a value was meant to have.

    Where a value may have several forms (a mapping or a word), pydantic lists the faults of each.
    """

    def is_of_another(fault: "ErrorDetails") -> bool:
        *key, form = fault["loc"]
        if not str(form).startswith(("dict[", "literal[")):
            return False
        others = [other["loc"] for other in faults if other is not fault]
        has_other_forms = any([*loc[: len(key)]] == key for loc in others)
        return has_other_forms and (fault["type"] == "dict_type") != isinstance(
            fault["input"], dict
        )

    return [fault for fault in faults if not is_of_another(fault)]


def _explain_fault(fault: "ErrorDetails", document: Document, fields: TaskSections) -> UserError:
    key = _without_forms(fault["loc"], document.value)
    name, where, value = join_key(key), document.origin_of(key), fault["input"]
    match fault["type"]:
        case "extra_forbidden":
            return _explain_unknown_key(key, document, fields)
        case "missing":
            where = where or document.origin_of(key[:-1])
            return UserError(f"{name}: missing", _line_of(key), where)
        case "literal_error":
            expected = fault["ctx"]["expected"].replace("'", "").replace(" or ", ", ")
            expected = expected.replace("True", "true").replace("False", "false")
            remedy = suggest(str(value).lower(), expected.split(", ")) or SEE_TABLE
            return UserError(f"{name}: {_short(value)} is not one of {expected}", remedy, where)
        case "model_type":
            text = "should be a section of `key: value`"
        case _:
            text = fault["msg"].removeprefix("Value error, ")
            text = text.replace("Input should", "should").replace("a valid tuple", "a list")
    if not isinstance(value, dict):
        text += f" (is {_short(value)})"
    return UserError(f"{name}: {text}", SEE_TABLE, where)


def _line_of(key: Key) -> str:
    """A line that gives a missing key."""
    if key == ("batch",):
        return "`batch: {samples: 32}` in the file, or --global-batch 32: samples of a step"
    *sections, name = key
    line = f"{name}: VALUE"
    if any(isinstance(part, int) for part in sections):
        return f"write `{line}` in this item of the list"
    for section in reversed(sections):
        line = f"{section}: {{{line}}}"
    return f"`{line}` in the file, or --set {join_key(key)}=VALUE"


def _without_forms(location: Key, value: Any) -> Key:
    """The key as the document has it, without pydantic's names of alternative types."""
    key: list[str | int] = []
    for number, part in enumerate(location):
        is_last = number == len(location) - 1
        within = isinstance(value, dict) and (part in value or is_last or not key)
        if within or (isinstance(value, list) and isinstance(part, int)) or value is None:
            key.append(part)
            value = _at(value, (part,))
    return tuple(key)


def _explain_unknown_key(key: Key, document: Document, fields: TaskSections) -> UserError:

    name, where = join_key(key), document.origin_of(key)
    task = document.value.get("task", DEFAULT_TASK)
    needed = task_needed(name)
    if needed and ":" not in str(task):  # a class of the user's has fields of its own
        what, remedy = needed
        return UserError(
            f"{name} is for {what}, which task {task} of this version does not have", remedy, where
        )
    known = _known(key[:-1], fields, _features_for(document))
    remedy = suggest(str(key[-1]), known) or f"known here: {', '.join(known)}"
    return UserError(f"{name}: unknown key", remedy, where)


def _known(section: Key, fields: TaskSections, rows: tuple[ListedFeature, ...]) -> list[str]:
    """The keys that a section of the config takes; empty if it is none."""
    within = tuple(row for row in rows if row.defaults.keys() & set(section))  # others stay out
    at: type[BaseModel] = config_class(DEFAULT_TASK, fields, rows, within)
    for part in section:
        if isinstance(part, int):
            continue
        inner = at.model_fields[part].annotation if part in at.model_fields else None
        sections = list(_sections_in(inner))  # itself, or those of a list
        if not sections:
            return []
        at = sections[0]
    return sorted(at.model_fields)


def _sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _sections_in(inner)


def _short(value: object) -> str:
    text = repr(value)
    if len(text) <= 60:
        return text
    return text[:57] + "..."


def _at(value: Any, key: Key) -> Any:
    for part in key:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def task_needed(key: str) -> tuple[str, str] | None:
    """The feature that a key asks for, and the remedy; None: the key is not known.

    The key is one that the config's task lacks.
    """
    what, task = feature_of(key)
    if not what:
        return None
    return what, f"{_SERVED_BY.get(task, '')}{USER_TASK_HINT}; or leave it out"


def feature_of(key: str) -> tuple[str, str]:
    """The feature that a key asks for, and the task that has it; empty where not known."""
    for name, part in _PARTS.items():
        if key == name or (name.endswith("_") and key.startswith(name)):
            return part
    return "", ""
