"""Make one config of a file, --set and the flags of config_options.py.

The later wins: default < file < --set < flag.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from samecurve.cli.config_options import CONFIG_FLAGS, ConfigFlag, Flags
from samecurve.core.strategies import STRATEGIES
from samecurve.errors import InvalidConfigError, UserError
from samecurve.terminal import echo

if TYPE_CHECKING:
    from samecurve.convert.converted_config import ConvertedConfig
    from samecurve.core.config.document import Document
    from samecurve.core.config.loading import LoadedConfig

_EXCLUSIVE = (
    ("dtype", "no_amp", "bf16"),
    ("launcher", "spawn"),
    ("warmup", "warmup_epochs"),
)
_TASK_FLAGS = tuple(flag for flag in CONFIG_FLAGS if flag.of_tasks)


def load_config(
    flags: Flags, *, say: bool, loud: bool = True, trains: bool = True
) -> "LoadedConfig":
    """Load the config: the file, then --set, then flags; the later wins.

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
    _apply_flags(document, flags)
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
    """The file's document in our words, and its conversion if it is another tool's config."""
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
    """The refusal of a command line without a config.

    It suggests a config of the task that has the typed flags, and names flags that no task has.
    """
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


def _key_of(flag: ConfigFlag, document: "Document") -> str:
    """The key of the flag in the document's task."""
    from samecurve.tasks import Tasks

    task, tasks = document.value.get("task"), Tasks()
    if not flag.elsewhere or not isinstance(task, str) or not tasks.knows(task):
        return flag.key
    section, _, name = flag.elsewhere.partition(".")
    fields = getattr(tasks.sections(task), section).model_fields
    return flag.elsewhere if name in fields else flag.key


def _is_new(document: "Document", flag: ConfigFlag, flags: Flags) -> bool:
    """Whether a flag brings a field that neither the file nor --set has."""
    return flags[flag.parameter] is not None and tuple(flag.key.split(".")) not in document.origins


def _check_is_read(task: str, flag: ConfigFlag, value: str) -> None:
    """Refuse a flag for a field that the source of the task's class does not mention."""
    from samecurve.tasks import entry_of

    name = flag.key.rpartition(".")[2]
    if not entry_of(task).mentions(name):
        raise UserError(
            f"{flag.names[0]} {value}: task {task} reads no {flag.key}",
            f"leave it out; --set {flag.key}={value} hands it to the class all the same",
            flag.names[0],
        )


def _load(document: "Document", name: str, converted: "ConvertedConfig | None") -> "LoadedConfig":
    """Check the document and make the config.

    InvalidConfigError: all errors of the config, the refusals of another tool's config among them.
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


def _apply_flags(document: "Document", flags: Flags) -> None:
    """Set what the flags say in the document."""
    for exclusive in _EXCLUSIVE:
        _only_one(flags, *exclusive)
    for flag in CONFIG_FLAGS:
        if flag.key and flag.given_in(flags):
            document.set(_key_of(flag, document), flag.value_in(flags), flag.names[0])
    precision = next((name for name in ("dtype", "no_amp", "bf16") if flags[name]), None)
    if precision and "train" in document.value:  # what is typed wins over what amp would choose
        document.set("train.amp", False, f"--{precision.replace('_', '-')}")
    _apply_devices(document, flags["devices"], flags["gpus"], flags["num_gpus"])
    _apply_length(document, flags["epochs"], flags["max_steps"])
    if flags["warmup_epochs"] is not None:
        document.set("schedule.warmup", _epochs(flags["warmup_epochs"]), "--warmup-epochs")


def _apply_devices(
    document: "Document", devices: str | None, gpus: str | None, count: int | None
) -> None:
    values = {"--devices": devices, "--gpus": gpus, "--num-gpus": count}
    names = [name for name, value in values.items() if value is not None]
    if len(names) > 1:
        raise UserError(f"{' and '.join(names)} both name devices", "give one of them", names[0])
    if gpus is not None:
        if gpus.startswith("cpu"):
            raise UserError(f"--gpus {gpus} names no GPU", f"--devices {gpus}", "--gpus")
        document.set("devices.use", gpus, "--gpus")
    if count is not None:
        if count < 0:
            raise UserError(f"--num-gpus {count}", "a number of GPUs, or 0 for all", "--num-gpus")
        document.set("devices.use", ",".join(map(str, range(count))) or "all", "--num-gpus")


def let_devices_win(document: "Document") -> str | None:
    """Let a flag that names several devices win over another tool's switch that leaves one.

    Returns a note for the user, if the flag won.
    """
    section = document.value.get("devices", {})
    flag, switch = (document.origins.get(("devices", name), "") for name in ("use", "strategy"))
    several = re.search(r"all|,|cpu:(?!1$)", section.get("use", ""))
    strategy, of_one = (
        section.get("strategy"),
        [row.name for row in STRATEGIES.values() if row.takes_one_device],
    )
    typed = flag.startswith("--") and not switch.startswith("--")
    if not several or not typed or strategy not in of_one:
        return None
    document.set("devices.strategy", "auto", flag)
    return f"{flag} names several devices: it replaces strategy {strategy} ({switch})"


def _apply_length(document: "Document", epochs: float | None, steps: int | None) -> None:
    section = document.value.get("train")
    config_steps = section.get("steps") if isinstance(section, dict) else None
    if epochs is not None and steps:
        raise UserError(
            f"--epochs {epochs:g} and --max-steps {steps} both fix the length",
            "give one of them",
            "--max-steps",
        )
    if epochs is None and steps == 0:
        if str(config_steps).endswith("ep"):
            return  # the config says how many
        raise UserError(
            "--max-steps 0 means whole epochs", "say how many: --epochs N", "--max-steps"
        )
    if epochs is not None:
        document.set("train.steps", _epochs(epochs), "--epochs")
    elif steps is not None:
        document.set("train.steps", steps, "--max-steps")


def _epochs(count: float) -> str:
    return f"{count:.9f}".rstrip("0").rstrip(".") + "ep"


def _only_one(flags: Flags, *parameters: str) -> None:
    used = [name for name in parameters if flags[name] is not None and flags[name] is not False]
    names = [f"--{name.replace('_', '-')}" for name in used]
    if len(names) > 1:
        raise UserError(
            f"{' and '.join(names)} contradict each other", "give one of them", names[0]
        )


def apply_batch(
    document: "Document",
    batch_size: int | None,
    grad_accum: int | None,
    global_batch_size: int | None,
) -> str | None:
    """Replace the batch section by --batch-size and --grad-accum, or by --global-batch.

    Returns a note for the user, if the meaning of the batch changed.
    """
    values = {
        "samples": (global_batch_size, "--global-batch"),
        "per_device": (batch_size, "--batch-size"),
        "accumulate": (grad_accum, "--grad-accum"),
    }
    if all(value is None for value, _ in values.values()):
        return None
    section = document.value.get("batch")
    old = section if isinstance(section, dict) else {}
    if global_batch_size is None and batch_size is None and old.get("per_device") is None:
        raise UserError(
            f"--grad-accum {grad_accum} needs a batch per device; the config gives"
            f" {old.get('samples', 'no')} samples over all devices",
            f"--batch-size N --grad-accum {grad_accum}; or leave it out: the plan finds the"
            " accumulation steps",
            "--grad-accum",
        )
    remaining = {}
    if global_batch_size is None:
        remaining = {key: old[key] for key in ("per_device", "accumulate") if key in old}
    places = {key: document.origin_of(("batch", key)) for key in remaining}
    document.set("batch", {}, "flags")
    for key, value in remaining.items():
        document.set(f"batch.{key}", value, places[key])
    for key, (new_value, flag) in values.items():
        if new_value is not None:
            document.set(f"batch.{key}", new_value, flag)
    if global_batch_size is not None or old.get("samples") is None:
        return None
    return (
        f"--batch-size is per device: it replaces the config's {old['samples']} samples over all"
        " devices (--global-batch fixes those)"
    )
