"""Write a call from Python as a command line: the task's class, the config and the flags."""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from samecurve.cli.main import cli, find_verb
from samecurve.core.config.document import dump_document, read_document, suggest
from samecurve.errors import RunError, SamecurveError, UserError
from samecurve.tasks.user_class import place_of
from samecurve.tasks.user_class.class_pickler import task_of
from samecurve.tasks.user_class.load_class import is_loading
from samecurve.tasks.user_class.user_errors import StartedWhileLoading

Configured = str | os.PathLike[str] | Mapping[str, Any]


@contextlib.contextmanager
def command_line(
    verb: str,
    task: type | Configured | None,
    config: Configured | None,
    flags: Mapping[str, Any],
) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """The arguments of the command line that says the same as a call, and the values of its
    options. Both are valid inside the block.

    UserError: the task is no task, a flag is unknown, or a flag's value has the wrong type. Errors
    that the block raises name a config that was given as a mapping `config`.
    """
    if is_loading():
        raise StartedWhileLoading
    task_class, config = _class_and_config(verb, task, config)
    with tempfile.TemporaryDirectory(prefix="samecurve-") as home:
        file = None if config is None or isinstance(config, Mapping) else os.fspath(config)
        path = Path(home) / "run.yaml"
        if isinstance(config, Mapping):
            path.write_text(dump_document(json.loads(json.dumps(config))))
            file = str(path)
        arguments = _arguments(verb, file, flags)
        if task_class is not None:
            _refuse_other_task(task_class, file, flags)
            arguments += ["--set", f"task={json.dumps(task_of(task_class, Path(home)))}"]
        try:
            options = _parse(verb, arguments)
            yield [*arguments, "--headless"], options
        except SamecurveError as error:
            if str(path) not in str(error):
                raise
            kind = UserError if error.exit_code == UserError.exit_code else RunError
            raise kind(str(error).replace(str(path), "config")) from None


def _class_and_config(
    verb: str, task: object, config: Configured | None
) -> tuple[type | None, Configured | None]:
    """The task's class, if the call has one, and the config."""
    if isinstance(task, type):
        return task, config
    if task is not None and not isinstance(task, str | os.PathLike | Mapping):
        name = type(task).__name__
        raise UserError(
            f"{verb}() is given an object of type {name}, where other processes need its class",
            f"samecurve.{verb}({name}, ...): the task's class itself, which has model(), loss() and"
            " train_data(); or a config",
            "task",
        )
    if task is not None and config is not None:
        raise UserError(
            f"{verb}() is given two configs",
            f"samecurve.{verb}(MyTask, config): a task's class first; or one config",
            "config",
        )
    return None, config if task is None else task


def _refuse_other_task(task_class: type, file: str | None, flags: Mapping[str, Any]) -> None:
    """Refuse a call whose config or flags name another task than its class."""
    settings = flags.get("set")
    others = [settings["task"]] if isinstance(settings, Mapping) and "task" in settings else []
    if file is not None:
        others += [task for task in [read_document(Path(file)).value.get("task")] if task]
    for other in others:
        place = place_of(other)
        if place is None or place.name != task_class.__name__:
            raise UserError(
                f"task: {other} in the config, and the class {task_class.__name__} beside it",
                "leave `task:` out of the config: the class is the task",
                "task",
            )


def _arguments(verb: str, file: str | None, flags: Mapping[str, Any]) -> list[str]:
    """The flags as words of a command line. UserError: the verb has no such flag."""
    known = {
        option.removeprefix("--").replace("-", "_")
        for parameter in find_verb(verb).params
        for option in parameter.opts
        if option.startswith("--")
    } - {"file", "headless", "json", "keys"}
    arguments = [] if file is None else ["-f", file]
    for name, value in flags.items():
        option = f"--{name.replace('_', '-')}"
        if name not in known:
            raise UserError(
                f"{verb}() has no {name}",
                suggest(name, sorted(known)) or f"the flags of `samecurve {verb} --help`, as names",
                name,
            )
        if name == "set":
            if not isinstance(value, Mapping):
                raise UserError(
                    f"set={value!r}", 'a mapping of config keys: set={"optimizer.clip": 0.5}', "set"
                )
            for key, setting in value.items():
                arguments += [option, f"{key}={json.dumps(setting)}"]
        elif value is True:
            arguments.append(option)
        elif isinstance(value, list | tuple):
            arguments += [option, ",".join(map(str, value))]
        elif value is not None and value is not False:
            arguments += [option, str(value)]
    return arguments


def _parse(verb: str, arguments: list[str]) -> dict[str, Any]:
    """The options' values by name. UserError: a value has the wrong type."""
    try:
        with cli.make_context("samecurve", [verb], resilient_parsing=True) as parent:
            return find_verb(verb).make_context(verb, list(arguments), parent=parent).params
    except click.ClickException as error:
        raise UserError(error.format_message(), f"`samecurve {verb} --help`") from None
