"""Refuse a command line without a config, with the configs at hand and a line to type."""

import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from samecurve.cli.importers import importer_of
from samecurve.cli.options import Flags, Typed
from samecurve.core.config.document import read_document
from samecurve.core.config.loading import feature_of, task_needed
from samecurve.core.system.installation import checkout
from samecurve.errors import InvalidConfigError, UserError
from samecurve.tasks import Tasks

_FOLDERS = ("models", "examples")
_FIRST = "tiny.yaml"  # the one that is quick anywhere
_MOST_FILES, _MOST_NAMES = 200, 12


def no_config(flags: Flags, typed: Typed) -> UserError:
    """The refusal of a command line without -f.

    It suggests a config of the task that has the typed flags, and names flags that no task has.
    """
    runs = [Path(str(flags[name])) for name in ("resume", "save_dir") if flags.get(name)]
    tasks = {key: feature_of(key)[1] for key in typed}
    served = [task for task in tasks.values() if Tasks().knows(task)]
    errors = [_suggestion(runs, served[0] if served else None)]
    for key, (_, flag) in typed.items():
        needed = task_needed(key)
        if needed and tasks[key] not in served:
            what, remedy = needed
            errors.append(UserError(f"{key} is for {what}", remedy, flag))
    return errors[0] if len(errors) == 1 else InvalidConfigError(errors)


def _suggestion(runs: Iterable[Path], task: str | None) -> UserError:
    """The configs at hand, and the typed line with one of them.

    runs: run directories that the line names; each holds the config that its run began with
    task: the task that has the typed flags, if only one has them
    """
    of_runs = [run / "config.yaml" for run in runs if (run / "config.yaml").is_file()]
    configs = [*of_runs, *_configs(Path(), ("", *_FOLDERS))]
    if task:
        configs = [path for path in configs if _task_of(path) == task]
    root = checkout()
    if not configs and root:
        configs = [path for path in _configs(root, _FOLDERS) if task in {None, _task_of(path)}]
    if not configs:
        return UserError(
            "no config was given: flags alone don't say what to train",
            f"{_line(Path('FILE'))}, a YAML or JSON file (`samecurve schema --table` says what it"
            " holds); or --set task=FILE.py:CLASS for a class of your own",
        )
    here = of_runs + [path for path in configs if path.parent == Path()]
    first = next((path for path in configs if path.name == _FIRST), configs[0])
    names = [str(path) for path in configs[:_MOST_NAMES]]
    if len(configs) > _MOST_NAMES:
        names.append(f"{len(configs) - _MOST_NAMES} more")
    return UserError(
        "no config was given: flags alone don't say what to train",
        f"{_line(here[0] if here else first)}; configs at hand: {', '.join(names)}",
    )


def _line(config: Path) -> str:
    """The line that was typed, with a config added."""
    verb, more = ["train"], []
    context = click.get_current_context(silent=True)
    if context:
        more = context.meta.get("arguments", [])
        verb = _names(context) or verb
    return shlex.join(["samecurve", *verb, "-f", str(config), *more])


def _names(context: click.Context) -> list[str]:
    """The words of the verb: `data show` is two."""
    if context.parent is None:
        return []
    return [*_names(context.parent), str(context.info_name)]


def _configs(root: Path, folders: tuple[str, ...]) -> Iterator[Path]:
    """The files in the folders that are configs, ours or another tool's."""
    for folder in folders:
        files = sorted((root / folder).glob("*"))
        candidates = [path for path in files if path.suffix in {".yaml", ".yml", ".json"}]
        yield from filter(_is_config, candidates[:_MOST_FILES])


def _task_of(config: Path) -> str | None:
    task = read_document(config).value.get("task")
    return task if isinstance(task, str) else None


def _is_config(path: Path) -> bool:
    try:
        document = read_document(path)
    except UserError:  # not text, or not a mapping: nothing to offer
        return False
    return "batch" in document.value or importer_of(document) is not None
