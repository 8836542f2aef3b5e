"""`samecurve init`."""

import os
import shlex
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import click

from samecurve.cli.completion import task_names, words, words_of_key
from samecurve.cli.options import Option
from samecurve.seam import PATH, UserError, Verb, echo, keeping


def _presets() -> list[str]:
    from samecurve_products.init.presets import all_presets

    return list(all_presets())


@click.command(cls=Verb, help_group="Begin")
@click.argument("new", required=False, type=PATH, metavar="[FILE]")
@click.option(
    "--devices",
    "--gpus",
    cls=Option,
    metavar="DEVICES",
    shell_complete=words_of_key("devices.use"),
    help="auto: all GPUs; indices: 0,1; cpu:2: two CPU ranks",
)
@click.option(
    "--task",
    metavar="TASK",
    shell_complete=words(task_names, files=True),
    help="language, ...; FILE.py:CLASS: a class of yours; FILE.py: a new file with a small task",
)
@click.option(
    "-d",
    "--data",
    metavar="DATA",
    shell_complete=words(tuple, files=True),
    help="a file, a folder or a pattern; example: data that need no download",
)
@click.option(
    "--model",
    metavar="FOLDER",
    shell_complete=words(tuple, files=True),
    help="of a model's files, where a preset needs one; none: no model",
)
@click.option(
    "--preset",
    metavar="PRESET",
    shell_complete=words(_presets),
    help="the config to begin from; it implies the task",
)
@click.option(
    "--batch", "--global-batch", cls=Option, metavar="N", help="samples of a step over all devices"
)
@click.option(
    "--scale-lr",
    metavar="RULE",
    shell_complete=words_of_key("schedule.scale_lr"),
    help="scale the learning rate: none, linear, sqrt",
)
@click.option(
    "--base-batch", metavar="N", help="--scale-lr: the batch that the learning rate was found for"
)
@click.option(
    "--launcher",
    metavar="LAUNCHER",
    shell_complete=words(lambda: ("samecurve", "torchrun")),
    help="samecurve or torchrun: what starts the ranks",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="any other config value: --set train.steps=1000",
)
@click.option(
    "--schema/--no-schema",
    default=True,
    show_default=True,
    help="the config names its JSON Schema, for editors",
)
@click.option("--replace", is_flag=True, help="write over a config that is there")
@click.option(
    "-y", "--yes", is_flag=True, help="ask nothing: the defaults answer what is not given"
)
@click.option("--start/--no-start", default=None, help="train at once, or not; asked if not given")
def init(
    *,
    new: Path | None,
    settings: tuple[str, ...],
    schema: bool,
    replace: bool,
    yes: bool,
    start: bool | None,
    **flags: str | None,
) -> None:
    """Write a config by answering a few questions.

    \b
    samecurve init                        asks everything
    samecurve init --task my_task.py      a new task of your own, its config and its test
    samecurve init --yes new.yaml         asks nothing
    """
    from samecurve.seam import alone
    from samecurve_products.init.answers import Answers, InputEndedError, Question
    from samecurve_products.init.interview import interview

    alone("init")
    by_flag = {
        f"--{name.replace('_', '-')}": value for name, value in flags.items() if value is not None
    }
    by_flag |= {"FILE": str(new)} if new is not None else {}
    by_flag |= {"--set": shlex.join(settings)} if settings else {}
    by_flag |= {"--replace": "yes"} if replace else {}
    by_flag |= {"--start": "yes" if start else "no"} if start is not None else {}
    asks = sys.stdin is not None and sys.stdin.isatty() and not yes
    if not asks and not yes:
        _check_complete(by_flag)
    answers = Answers(by_flag, asks=asks)
    written = interview(answers, schema=schema)
    for path in written.files:
        echo(f"wrote  {path}")
    for name, line in written.next_lines:
        echo(f"{name:<6} {shlex.join(line)}")
    echo(f"train  {shlex.join(written.command)}")
    with keeping("the files above are written"), suppress(InputEndedError):
        if answers.confirm(Question("--start", "Start it now? yes or no", "no")):
            os.execvp(written.command[0], [*written.command])


def _check_complete(by_flag: Mapping[str, str]) -> None:
    """UserError: a question is not answered, and there is no terminal to ask on."""
    from samecurve_products.init.interview import NEEDED, missing_flags

    missing = missing_flags(by_flag)
    if not missing:
        return
    echo("The questions, and the flags that answer them:", err=True)
    for flag, answer in NEEDED.items():
        echo(f"  {flag:<11} {answer}{'   (missing)' if flag in missing else ''}", err=True)
    raise UserError(
        f"there is no terminal to ask on, and these are not answered: {', '.join(missing)}",
        "give these flags; or --yes, which takes the defaults",
        "init",
    )
