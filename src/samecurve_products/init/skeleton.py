"""A skeleton of a task: a file with a small class that trains at once, its config and its test."""

import keyword
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.resources import files
from pathlib import Path

from samecurve.core.config.loading import DEFAULT_TASK
from samecurve.seam import Document, Tasks, UserError, dump_document, load_document, parse_setting
from samecurve_products.init.answers import Answers, Question
from samecurve_products.init.new_files import (
    Target,
    check_takes_files,
    may_replace,
    schema_beside,
    schema_line,
    train_command,
    write_files,
)

_BATCH = "50"  # samples, of the skeleton's own 1000
_UNUSED = ("--data", "--model", "--preset", "--scale-lr", "--base-batch", "--set")


@dataclass(frozen=True)
class Skeleton:
    """The files to write, each with its text, and those of them that are replaced."""

    texts: Mapping[Path, str]
    replaced: tuple[Path, ...]
    config: Path
    test: Path

    def write(self) -> None:
        """UserError: a file can't be written; nothing is then left."""
        write_files(self.texts, replaced=self.replaced)


def make_skeleton(
    task: str, answers: Answers, *, use: str, target: Target | None, schema: bool
) -> Skeleton:
    """The skeleton of a task in a new file.

    task: the file
    use: the devices, as the config has them
    target: the config's file; None: beside the task's, and named as it is

    UserError: a file of that name is there, it can't be written, or an answer is wrong.
    """
    for flag in _UNUSED:
        if answers.by_flag(flag) is not None:
            raise UserError(
                f"{flag} says nothing about the new task {task}", "change it in the files", flag
            )
    batch = answers.ask(Question("--batch", "Batch", _BATCH), _check_batch)
    file = check_new_file(Path(task))
    target = target or _config_of(file, answers)
    test = file.with_name(f"test_{file.name}")
    replaced = [target.path] if target.replaces else []
    if test.exists():
        if not may_replace(answers, test):
            raise UserError(f"{test} exists", "another name for the task's file", "--task")
        replaced.append(test)
    name = _class_name(file.stem)
    words = {
        "stem": file.stem,
        "name": name,
        "task": f"{file.as_posix()}:{name}",
        "train": " ".join(train_command(target.path)),
        "config": target.path.as_posix(),
        "test": test.as_posix(),
        "depth": len(file.parts) - 1,
        "batch": batch,
    }
    texts = {file: _filled("task.py.txt", words), test: _filled("test.py.txt", words)}
    line = schema_line(target.path) if schema else ""
    devices = "" if use == "auto" else dump_document({"devices": {"use": use}})
    texts[target.path] = f"{line}{_filled('config.yaml.txt', words)}{devices}"
    texts |= schema_beside(target.path) if schema else {}
    return Skeleton(texts, tuple(replaced), target.path, test)


def _config_of(file: Path, answers: Answers) -> Target:
    """The config beside the task's file, and named as it is."""
    config = file.with_suffix(".yaml")
    if not config.exists():
        return Target(config)
    if not may_replace(answers, config):
        raise UserError(f"{config} exists", "name another: samecurve init FILE --task ...", "FILE")
    return Target(config, replaces=True)


def check_new_file(file: Path) -> Path:
    """The file, relative to this directory. UserError: no task can be made there."""
    if not file.stem.isidentifier() or keyword.iskeyword(file.stem):
        plain = re.sub(r"\W+", "_", file.stem).strip("_") or "my_task"
        plain = f"task_{plain}" if not plain.isidentifier() or keyword.iskeyword(plain) else plain
        raise UserError(
            f"{file.name} is no name of a Python module",
            f"letters, digits and underscores: --task {file.with_name(f'{plain}.py')}",
            "--task",
        )
    try:
        file = file.resolve().relative_to(Path.cwd())
    except ValueError:
        raise UserError(
            f"{file} lies outside of this directory, from which the config names it",
            f"cd to a directory above it first, such as {file.resolve().parent}",
            "--task",
        ) from None
    if file.exists():
        raise UserError(
            f"{file} exists, and is never written over",
            f"--task {file}:CLASS makes a config for a class in it; or another name",
            "--task",
        )
    if file.stem in sys.stdlib_module_names or PathFinder.find_spec(file.stem, sys.path[1:]):
        raise UserError(
            f"{file.name} would hide the module {file.stem}, which is installed",
            f"another name: --task my_{file.stem}.py",
            "--task",
        )
    check_takes_files(file.parent)
    return file


def _check_batch(answer: str) -> int:
    """UserError: the config takes no such batch."""
    document = Document({"task": DEFAULT_TASK})
    document.set(*parse_setting(f"batch.samples={answer}"), "--batch")
    return load_document(document, Tasks()).config.batch.samples or 0


def _class_name(stem: str) -> str:
    """'my_file' -> 'MyFile'."""
    name = "".join(part[:1].upper() + part[1:] for part in stem.split("_"))
    return name if name.isidentifier() and not keyword.iskeyword(name) else "MyTask"


def _filled(template: str, words: Mapping[str, object]) -> str:
    text = (files("samecurve_products.init") / "skeleton_files" / template).read_text(
        encoding="utf-8"
    )
    return text.format(**words)
