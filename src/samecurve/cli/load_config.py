"""Make one config of a file, --set and the options of the command line.

The later wins: default < file < --set < option. What a config or a flag has measured before a plan
is here, too.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samecurve.cli.options import CONFIG_OPTIONS, Flags, Typed, add_typed
from samecurve.core.strategies import STRATEGIES
from samecurve.errors import InvalidConfigError, UserError
from samecurve.terminal import echo
from samecurve.units import counted

if TYPE_CHECKING:
    from samecurve.cli.importers import ImportedConfig
    from samecurve.core.config.document import Document
    from samecurve.core.config.loading import LoadedConfig
    from samecurve.core.config.sections import Config
    from samecurve.core.planning.facts import Facts, Measure
    from samecurve.core.planning.machine import Machine


def load_config(
    flags: Flags, *, say: bool, loud: bool = True, trains: bool = True
) -> "LoadedConfig":
    """Load the config. A file of another tool is converted first.

    say: whether notes are printed; False where stdout is for JSON
    loud: False in a rank that is not the first: the first prints the notes
    trains: False where nothing is trained: the flags need no file then

    InvalidConfigError: all errors of the config, the refusals of another tool's config among them.
    """
    from samecurve.core.config.loading import load_document, task_needed
    from samecurve.tasks import Tasks

    file: Path | None = flags["file"]
    document, converted = _read(file, loud=loud)
    _apply_settings(document, flags)
    typed = _typed_values(flags)
    if trains and not file and "task" not in document.value:
        from samecurve.cli.missing_config import no_config

        raise no_config(flags, typed)
    # fields of some tasks only, which neither the file nor --set has
    new = {
        key for key in typed if task_needed(key) and tuple(key.split(".")) not in document.origins
    }
    notes = _apply(document, typed, converted=converted is not None)
    errors = converted.unresolved(document) if converted else []
    try:
        loaded = load_document(document, Tasks(), file.stem if file else "run")
    except UserError as error:
        raise (InvalidConfigError([*errors, error]) if errors else error) from None
    if errors:
        raise InvalidConfigError(errors)
    if say and loud:
        if flags["distributed_data_loading"]:
            always = "always so; each rank reads only its own samples"
            echo(f"note   --distributed-data-loading: {always}", err=True)
        launcher = loaded.config.devices.launcher
        if launcher != "direct":
            echo(f"note   devices.launcher {launcher}: ranks are started as with direct", err=True)
    for key in new:
        _check_is_read(loaded.config.task, key, *typed[key])
    directory = converted.run_directory if converted else None
    return replace(loaded, notes=(*loaded.notes, *notes), run_directory=directory)


def set_flags(document: "Document", flags: Flags) -> list[str]:
    """Set in a document that was another tool's what the flags say. Returns notes for the user."""
    _apply_settings(document, flags)
    return _apply(document, _typed_values(flags), converted=True)


def _apply_settings(document: "Document", flags: Flags) -> None:
    from samecurve.core.config.document import parse_setting

    for setting in flags["settings"]:
        key, value = parse_setting(setting)
        document.set(key, value, f"--set {key}")


def _read(file: Path | None, *, loud: bool) -> "tuple[Document, ImportedConfig | None]":
    """The file's document in our words, and its conversion if it is another tool's config."""
    from samecurve.core.config.document import Document, read_document
    from samecurve.tasks.user_class import find_pickled_class

    if file is None:
        return Document(), None
    document = read_document(file)
    find_pickled_class(document, file.parent)
    if "task" in document.value:  # no other tool's config has one
        return document, None
    from samecurve.cli.importers import importer_of

    importer = importer_of(document)
    converted = importer.convert(document, file.parent) if importer else None
    if converted is None:
        return document, None
    if loud:
        note = f"note   {file} is a config of {converted.tool}"
        if hasattr(converted, "to_yaml"):
            note += f"; `samecurve convert {file} --to NEW.yaml` writes it as one of Samecurve"
        echo("\n".join([note, *converted.summary_lines()]), err=True)
    return converted.document, converted


def _typed_values(flags: Flags) -> dict[str, tuple[Any, str]]:
    """The keys that the typed flags set. UserError: two flags set the same key."""
    typed: dict[str, tuple[Any, str]] = {}
    for option in CONFIG_OPTIONS:
        value, flag = flags[str(option.name)], option.opts[0]
        if not option.key or value is None:
            continue
        if option.key in typed and (flag, value) == ("--max-steps", 0):
            continue  # whole epochs, and --epochs says how many
        add_typed(typed, option.key, value, flag)
    return typed


def _apply(document: "Document", typed: Typed, *, converted: bool) -> list[str]:
    """Set in the document what the flags say. Returns notes for the user.

    converted: the document was another tool's
    """
    for key, (value, flag) in typed.items():
        if key == "train.steps" and value == 0:
            _check_counts_epochs(document)
        elif not key.startswith("batch."):
            document.set(_key_in_task(document, key), value, flag)
    if "train.precision" in typed:  # what is typed wins over what amp would choose
        document.set("train.amp", False, typed["train.precision"][1])
    notes = [apply_batch(document, typed)]
    if converted:
        notes = [let_devices_win(document), let_task_win(document), *notes]
    return [note for note in notes if note]


def _key_in_task(document: "Document", key: str) -> str:
    """The key as the document's task has it: some tasks have the length of a sample in `data`."""
    from samecurve.tasks import Tasks

    task, tasks = document.value.get("task"), Tasks()
    if key != "model.max_seq_len" or not isinstance(task, str) or not tasks.knows(task):
        return key
    return "data.seq_len" if "seq_len" in tasks.sections(task).data.model_fields else key


def _check_counts_epochs(document: "Document") -> None:
    """UserError: --max-steps 0 is typed, and nothing says how many epochs."""
    section = document.value.get("train")
    if not isinstance(section, dict) or not str(section.get("steps")).endswith("ep"):
        raise UserError(
            "--max-steps 0 means whole epochs", "say how many: --epochs N", "--max-steps"
        )


def _check_is_read(task: str, key: str, value: str, flag: str) -> None:
    """Refuse a flag for a field that a task neither declares nor mentions in its class's source."""
    from samecurve.tasks import Tasks, entry_of

    section, _, field = key.partition(".")
    declared = getattr(Tasks().sections(task), section, None)
    if declared is not None and field in declared.model_fields:
        return
    if not entry_of(task).mentions(field):
        raise UserError(
            f"{flag} {value}: task {task} reads no {key}",
            f"leave it out; --set {key}={value} hands it to the class all the same",
            flag,
        )


def let_devices_win(document: "Document") -> str | None:
    """Let a flag that names several devices win over another tool's switch that leaves one.

    Returns a note for the user, if the flag won.
    """
    section = document.value.get("devices", {})
    flag, switch = (document.origins.get(("devices", name), "") for name in ("use", "strategy"))
    several = re.search(r"all|,|cpu:(?!1$)", section.get("use", ""))
    strategy = section.get("strategy")
    of_one_device = {row.name for row in STRATEGIES.values() if row.takes_one_device}
    typed = flag.startswith("--") and not switch.startswith("--")
    if not several or not typed or strategy not in of_one_device:
        return None
    document.set("devices.strategy", "auto", flag)
    return f"{flag} names several devices: it replaces strategy {strategy} ({switch})"


def let_task_win(document: "Document") -> str | None:
    """Leave out what the other tool does to its own model, where a flag names another one.

    Returns a note for the user, if something was left out.
    """
    from samecurve.cli.importers import NOT_IN_THE_FILE

    origin = document.origin_of(("train", "recompute"))
    named = document.origin_of(("task",)).startswith("--")
    if not named or not origin.startswith(NOT_IN_THE_FILE):
        return None
    document.set("train.recompute", "none", "--set task")
    return (
        "--set task names a model of your own: train.recompute is none; the file's model has"
        " gradient checkpointing"
    )


def apply_batch(document: "Document", typed: Typed) -> str | None:
    """Replace the batch section by --batch-size and --grad-accum, or by --global-batch.

    Returns a note for the user, if the meaning of the batch changed.
    """
    keys = ("samples", "per_device", "accumulate")
    new = {key: typed[f"batch.{key}"] for key in keys if f"batch.{key}" in typed}
    if not new:
        return None
    section = document.value.get("batch")
    old = section if isinstance(section, dict) else {}
    kept = [] if "samples" in new else [key for key in keys[1:] if key in old]
    values = {key: (old[key], document.origin_of(("batch", key))) for key in kept} | new
    if "samples" not in new and values.get("per_device", (None, ""))[0] is None:
        accumulate, flag = new["accumulate"]
        raise UserError(
            f"--grad-accum {accumulate} needs a batch per device; the config gives"
            f" {old.get('samples', 'no')} samples over all devices",
            f"--batch-size N --grad-accum {accumulate}; or leave it out: the plan finds the"
            " accumulation steps",
            flag,
        )
    document.set("batch", {}, "flags")
    for key, (value, origin) in values.items():
        document.set(f"batch.{key}", value, origin)
    if "samples" in new or old.get("samples") is None:
        return None
    return _dropped_batch(old["samples"], values, new)


def _dropped_batch(samples: object, values: Typed, new: Typed) -> str:
    """Say that typed flags replace the config's batch, and what keeps it.

    samples: of the config, over all devices
    values: fields of the new batch; new: those that are typed
    """
    flags = " ".join(f"{flag} {value}" for value, flag in new.values())
    sets = f"{values['per_device'][0]} samples per device"
    if "accumulate" in values:
        sets += f", in each of {counted(values['accumulate'][0], 'accumulation step')}"
    remedy = f"add --global-batch {samples}"
    if "accumulate" in new:
        accumulate, flag = new["accumulate"]
        remedy = f"leave {flag} {accumulate} out"
        if "per_device" in new:
            remedy = f"--global-batch {samples} in place of {flag} {accumulate}"
    return (
        f"{flags} sets {sets}; the config's batch of {samples} samples (batch.samples) is not"
        f" used. To keep {samples}: {remedy}"
    )


def probe_facts(loaded: "LoadedConfig") -> "Facts":
    """The facts for --probe-batch: how many samples at once fitted."""
    from samecurve.experiments.probe_batch import probe_batch

    return probe_batch(loaded.config)


def measure_before(ready: Callable[[], object] = lambda: None) -> "Measure":
    """The function that measures, before a run, what its plan goes by, where the plan does.

    ready: is called first, to wait for imports in other threads
    """

    def measure(config: "Config", machine: "Machine", facts: "Facts") -> "Facts":
        is_named = any(row.name == "balance" for row in config.named_features)
        if machine.started > 1 or not is_named:  # the plan refuses to measure ranks started so
            return facts
        from samecurve.features.balance import balance_of

        if balance_of(config) == "measured":
            ready()
            from samecurve.experiments.balance import measure_speeds

            facts = measure_speeds(config, machine, facts)
        return facts

    return measure
