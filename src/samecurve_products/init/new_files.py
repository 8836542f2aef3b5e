"""The files that the interview writes, all of them or none, and the commands that use them."""

import json
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import samecurve
from samecurve.core.config.json_schema import json_schema
from samecurve.core.system import write_new
from samecurve.seam import (
    Tasks,
    UserError,
    checkout,
    dump_document,
    explain_os_error,
    python_module,
    write_whole,
)
from samecurve_products.init.answers import Answers, Question, tell
from samecurve_products.init.planned import Settled, with_values

SCHEMA = "config.schema.json"
_SUFFIXES = {".yaml", ".yml"}


@dataclass(frozen=True)
class Target:
    """The config file to write. replaces: the user wants the file there to be replaced"""

    path: Path
    replaces: bool = False


def choose_file(answers: Answers, default: str) -> Target:
    """The config file to write: one that is not there, or that may be replaced."""
    while True:
        path = answers.ask(Question("FILE", "Config file to write", default), _check_file)
        if not path.exists():
            return Target(path)
        if may_replace(answers, path):
            return Target(path, replaces=True)
        answers.forget("FILE")


def may_replace(answers: Answers, path: Path) -> bool:
    """Whether the user wants a file to be replaced. UserError: nobody can be asked."""
    text = f"{path} exists. Replace it? yes or no"
    if answers.confirm(Question("--replace", text, "no")):
        return True
    if not answers.asks:
        raise UserError(f"{path} exists", "another name, or --replace to write over it", "FILE")
    return False


def _check_file(answer: str) -> Path:
    """UserError: no config can be written there."""
    path = Path(answer).expanduser()
    if path.suffix not in _SUFFIXES:
        raise UserError(f"{answer}: a config is YAML here", "a name that ends in .yaml", "FILE")
    if path.is_dir():
        raise UserError(f"{path} is a directory", "the name of a file", "FILE")
    check_takes_files(path.parent)
    return path


def check_takes_files(directory: Path) -> None:
    """UserError: no file can be written in the directory."""
    if not directory.exists():
        remedy = f"mkdir -p {shlex.quote(str(directory))} makes it; or another name"
        raise UserError(f"there is no directory {directory}", remedy, "FILE")
    try:
        with tempfile.TemporaryFile(dir=directory):
            return
    except OSError as error:
        cause, remedy = explain_os_error(error, directory, "give the name again; or another name")
        raise UserError(cause, remedy, "FILE") from None


def write_files(texts: Mapping[Path, str], *, replaced: Sequence[Path] = ()) -> None:
    """Write files. A file that exists is refused, unless it is one of `replaced`.

    UserError: a file can't be written. Those that were new are then removed again.
    """
    written: list[Path] = []
    path = Path()
    try:
        for path, text in texts.items():
            if path in replaced:
                write_whole(path, text.encode())
            else:
                write_new(path, text.encode())
                written.append(path)
    except BaseException as error:
        for new in written:
            with suppress(OSError):
                new.unlink()
        if not isinstance(error, OSError):
            raise
        cause, remedy = explain_os_error(error, path, "start again; or another name")
        raise UserError(cause, remedy, "FILE") from None


def write_config(answers: Answers, target: Target, settled: Settled, *, schema: bool) -> list[Path]:
    """Write the config. Returns what was written, the config first.

    On a terminal another name is asked for where it can't be written.

    schema: with a line for editors, and the schema beside it where there is none
    """
    while True:
        path = target.path
        texts = {path: config_text(path, settled, schema=schema)}
        texts |= schema_beside(path) if schema else {}
        try:
            write_files(texts, replaced=[path] if target.replaces else [])
        except UserError as error:
            if not answers.asks:
                raise
            tell(error)
            answers.forget("FILE", "--replace")
            target = choose_file(answers, path.name)
        else:
            return list(texts)


def config_text(path: Path, settled: Settled, *, schema: bool) -> str:
    """The config as YAML: all that the preset and the answers say."""
    document = with_values(settled.planned.document, {})
    for section, name, default in (("devices", "use", "auto"), ("schedule", "scale_lr", "none")):
        values = document.value.get(section, {})
        if values.get(name) == default:
            del values[name]
    full = {name: value for name, value in document.value.items() if value != {}}
    made = f"# Made by `samecurve init` {samecurve.__version__} on {time.strftime('%Y-%m-%d')}"
    line = schema_line(path) if schema else ""
    return f"{line}{made}: {settled.title}\n{dump_document(full, compact=True)}"


def schema_line(path: Path) -> str:
    """The comment by which an editor finds the schema of the config at `path`."""
    return f"# yaml-language-server: $schema={_schema_place(path)}\n"


def _schema_place(path: Path) -> str:
    """The schema in this checkout, for a config within it; else a file beside the config."""
    root, home = checkout(), path.parent.resolve()
    if root is not None and home.is_relative_to(root) and (root / "docs" / SCHEMA).is_file():
        return Path(os.path.relpath(root / "docs" / SCHEMA, home)).as_posix()
    return SCHEMA


def schema_beside(path: Path) -> dict[Path, str]:
    """The schema's file, where the config's comment names one beside it and there is none."""
    file = path.parent / SCHEMA
    if _schema_place(path) != SCHEMA or file.exists():
        return {}
    return {file: json.dumps(json_schema(Tasks()), indent=1) + "\n"}


def train_command(path: Path, *, ranks: int | None = None) -> list[str]:
    """The command that trains with a config.

    ranks: torchrun starts so many; None: samecurve starts them
    """
    arguments = ["train", "-f", path.as_posix()]
    if ranks is None:
        return [*program("samecurve", "samecurve"), *arguments]
    torchrun = program("torchrun", "torch.distributed.run")
    return [*torchrun, "--standalone", f"--nproc_per_node={ranks}", "-m", "samecurve", *arguments]


def program(name: str, module: str) -> list[str]:
    """A program by its name, where that is the one of this Python, else as a module."""
    there = shutil.which(name)
    if there and Path(there).parent == Path(sys.executable).parent:
        return [name]
    return python_module(module)
