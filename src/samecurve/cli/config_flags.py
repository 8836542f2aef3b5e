"""How a file, --set and the flags of config_options.py become one config.

The later wins: default < file < --set < flag.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from samecurve.cli.apply_flags import Flags, apply_batch, apply_flags, let_devices_win
from samecurve.cli.config_options import VALUE_FLAGS, ValueFlag
from samecurve.errors import InvalidConfigError, UserError
from samecurve.terminal import echo

if TYPE_CHECKING:
    from samecurve.convert.converted_config import ConvertedConfig
    from samecurve.core.config.document import Document
    from samecurve.core.config.loading import LoadedConfig

_TASK_FLAGS = tuple(flag for flag in VALUE_FLAGS if not flag.help)  # fields of some tasks


def load_config(
    flags: Flags, *, say: bool, loud: bool = True, trains: bool = True
) -> "LoadedConfig":
    """File, then --set, then flags: the later wins.

    A file of another tool is converted first.

    say: whether notes are printed; False where stdout is for JSON
    loud: False where another process says what was converted
    trains: False where flags may do without a file, since nothing is trained
    """
    from samecurve.core.config.document import parse_setting

    file: Path | None = flags["file"]
    document, converted = _read(file, loud=loud)
    for setting in flags["settings"]:
        key, value = parse_setting(setting)
        document.set(key, value, f"--set {key}")
    if trains and not file and "task" not in document.value:
        raise _no_config(flags)
    for_another_task = [flag for flag in _TASK_FLAGS if _is_new(document, flag, flags)]
    for flag in VALUE_FLAGS:
        value = flags[flag.parameter]
        if value is not None:
            document.set(_key_of(flag, document), value, flag.names[0])
    apply_flags(document, flags)
    notes = [
        let_devices_win(document) if converted else None,
        apply_batch(document, flags["batch_size"], flags["grad_accum"], flags["global_batch"]),
    ]
    if flags["distributed_data_loading"] and say and loud:
        echo(
            "note   --distributed-data-loading: always so; each rank reads only its own samples",
            err=True,
        )
    loaded = _load(document, file.stem if file else "run", converted)
    if loaded.config.devices.launcher == "spawn" and say and loud:
        echo("note   devices.launcher spawn: the ranks are started as with direct", err=True)
    for flag in for_another_task:
        _check_is_read(loaded.config.task, flag, flags[flag.parameter])
    return replace(
        loaded,
        notes=tuple(note for note in notes if note),
        run_directory=converted.run_directory if converted else None,
    )


def _read(file: Path | None, *, loud: bool) -> "tuple[Document, ConvertedConfig | None]":
    """A file's document, in our words, and how it was converted if it is another tool's."""
    from samecurve.convert import convert
    from samecurve.core.config.document import Document, read_file
    from samecurve.tasks.user_class.class_place import find_pickled_class

    if file is None:
        return Document(), None
    document = read_file(file)
    find_pickled_class(document, file.parent)
    converted = convert(document)
    if converted is None:
        return document, None
    if loud:
        note = (
            f"note   {file} is a config of {converted.tool}; `samecurve convert {file} --to"
            " NEW.yaml` writes it as one of Samecurve"
        )
        echo("\n".join([note, *converted.summary_lines()]), err=True)
    return converted.document, converted


def _no_config(flags: Flags) -> UserError:
    """With a config of the task that the flags are of; what no task here has is named, too."""
    from samecurve.cli.missing_config import no_config
    from samecurve.core.config.unsupported import task_needed, task_that_has
    from samecurve.tasks import Tasks

    runs = [Path(flags[name]) for name in ("resume", "save_dir") if flags.get(name)]
    typed = [flag for flag in _TASK_FLAGS if flags[flag.parameter] is not None]
    served = [flag for flag in typed if Tasks().knows(task_that_has(flag.key))]
    errors = [no_config(runs, task_that_has(served[0].key) if served else None)]
    for flag in typed:
        needed = task_needed(flag.key)
        if needed and flag not in served:
            what, remedy = needed
            errors.append(UserError(f"{flag.key} is for {what}", remedy, flag.names[0]))
    return errors[0] if len(errors) == 1 else InvalidConfigError(errors)


def _key_of(flag: ValueFlag, document: "Document") -> str:
    """Where the document's task has what the flag names."""
    from samecurve.tasks import Tasks

    task, tasks = document.value.get("task"), Tasks()
    if not flag.elsewhere or not isinstance(task, str) or not tasks.knows(task):
        return flag.key
    section, _, name = flag.elsewhere.partition(".")
    fields = getattr(tasks.sections(task), section).model_fields
    return flag.elsewhere if name in fields else flag.key


def _is_new(document: "Document", flag: ValueFlag, flags: Flags) -> bool:
    """Whether a flag brings a field that neither the file nor --set has."""
    return flags[flag.parameter] is not None and tuple(flag.key.split(".")) not in document.origins


def _check_is_read(task: str, flag: ValueFlag, value: str) -> None:
    """UserError: the task's class takes any field, and its source does not name this one."""
    from samecurve.tasks import entry_of

    name = flag.key.rpartition(".")[2]
    if not entry_of(task).mentions(name):
        raise UserError(
            f"{flag.names[0]} {value}: task {task} reads no {flag.key}",
            f"leave it out; --set {flag.key}={value} hands it to the class all the same",
            flag.names[0],
        )


def _load(document: "Document", name: str, converted: "ConvertedConfig | None") -> "LoadedConfig":
    """The document, checked.

    InvalidConfigError: what another tool's config asks for and is not served, with all that is
    wrong otherwise.
    """
    from samecurve.core.config.loading import load
    from samecurve.tasks import Tasks

    unsettled = converted.unresolved(document) if converted else []
    try:
        loaded = load(document, Tasks(), name)
    except InvalidConfigError as wrong:
        raise InvalidConfigError([*unsettled, *wrong.errors], wrong.more) from None
    except UserError as wrong:
        if unsettled:
            raise InvalidConfigError([*unsettled, wrong]) from None
        raise
    if unsettled:
        raise InvalidConfigError(unsettled)
    return loaded
