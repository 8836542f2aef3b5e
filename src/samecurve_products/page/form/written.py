"""A draft as a config file with what differs from the defaults, and as a command line."""

import shlex
import time
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import samecurve
from samecurve.core.config import flatten
from samecurve.seam import (
    Config,
    Document,
    Tasks,
    UserError,
    dump_document,
    load_document,
    parse_document,
    read_document,
)
from samecurve_products.page.form.draft import Draft
from samecurve_products.page.form.values import settings

CONFIGS = "configs"  # the folder, below a root, that new config files are written to
_SECTIONS = tuple(Config.model_fields)
_MOST_NAME = 60
_MOST_NAME_BYTES = 200  # a file's name has at most 255, and a run's has its time


@dataclass(frozen=True)
class CommandLine:
    """The command that trains a draft.

    file: the config file, relative to the folder in which the command is typed
    text: the file's content, where it has to be written; None: it is there already
    """

    file: Path
    options: tuple[str, ...]
    text: str | None

    @property
    def arguments(self) -> tuple[str, ...]:
        """The words that follow `samecurve`."""
        return ("train", "-f", self.file.as_posix(), *self.options)

    def __str__(self) -> str:
        return shlex.join(["samecurve", *self.arguments])


def command_line(draft: Draft, name: str) -> CommandLine:
    """The command of a draft: a config file unchanged with --set, or a new file.

    A new file never takes the place of one with another content.
    """
    if draft.base.file is not None:
        return CommandLine(draft.base.file, tuple(_options(draft.changes)), None)
    return new_file(draft, name)


def new_file(draft: Draft, name: str) -> CommandLine:
    """The command with a config file of its own."""
    text = as_yaml(draft)
    folder = Path(CONFIGS)
    for number in range(1, 1000):
        file = folder / (f"{name}.yaml" if number == 1 else f"{name}-{number}.yaml")
        there = draft.base.home / file
        if not there.exists():
            return CommandLine(file, (), text)
        if _same_config(there, text):
            return CommandLine(file, (), None)
    raise UserError(f"{folder / name}.yaml and 998 like it exist", "another name", "name")


def _same_config(path: Path, text: str) -> bool:
    """Whether a file holds the same values; its comments may be others."""
    try:
        return read_document(path).value == parse_document(text, "new").value
    except UserError:
        return False


def _options(changes: Mapping[str, Any]) -> list[str]:
    """Flags for the changed values."""
    others = {key: value for key, value in changes.items() if key != "devices.use"}
    options = [word for setting in settings(others) for word in ("--set", setting)]
    if "devices.use" in changes:
        options += ["--devices", str(changes["devices.use"])]
    return options


def write(draft: Draft, command: CommandLine) -> Path:
    """Write the command's config file, if it has to be. Returns its path.

    UserError: it can't be written, or another request has written one of this name meanwhile.
    """
    path = draft.base.home / command.file
    if command.text is None:
        return path
    try:
        path.parent.mkdir(exist_ok=True)
        with open(path, "x", encoding="utf-8") as file:
            file.write(command.text)
    except OSError as error:
        raise UserError(
            f"{command.file} can't be written: {error.strerror}",
            "another name, or free room",
            "name",
        ) from None
    return path


def check_name(name: object, default: str) -> str:
    """A name for a run or a file: letters of any language, digits, dots and dashes.

    What else a name has becomes a dash. UserError: nothing is left, or the name is too long.
    """
    text = unicodedata.normalize("NFC", str(name or default).strip())
    kept = [char if char in "._-" or _is_of_a_word(char) else " " for char in text]
    plain = "-".join("".join(kept).split()).strip("-.")
    if not plain or len(text) > _MOST_NAME or len(plain.encode()) > _MOST_NAME_BYTES:
        raise UserError(
            f"{text[:80]!r} can't be a name",
            f"1 to {_MOST_NAME} letters, digits and dashes",
            "name",
        )
    return plain


def _is_of_a_word(char: str) -> bool:
    """Whether a character is a letter, a mark on a letter, or a digit."""
    return unicodedata.category(char)[0] in "LMN"


def as_yaml(draft: Draft) -> str:
    """The draft's config as YAML: the task, the batch, and what differs from the defaults.

    Loading it gives the same config.
    """
    assert draft.loaded is not None
    config, full = draft.loaded.config, draft.document.value
    short = _without_defaults(full, config)
    if not _gives(short, config):  # a default here follows from another value
        short["model"] = dict(full.get("model", {}))
    if not _gives(short, config):
        short = dict(full)
    ordered = {name: short[name] for name in _SECTIONS if name in short}
    head = f"# Made by `samecurve ui` {samecurve.__version__} on {time.strftime('%Y-%m-%d')}"
    return f"{head}, from {draft.base.title}.\n{dump_document(ordered)}"


def _without_defaults(full: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """The document without values that the config has by default."""
    short: dict[str, Any] = {"task": config.task}
    for section in _SECTIONS[1:]:
        if section not in full:
            continue
        values = full[section]
        part = getattr(config, section)
        if not isinstance(values, dict):
            if part != type(config).model_fields[section].get_default():
                short[section] = values
            continue
        fields = type(part).model_fields
        kept = {
            name: value
            for name, value in values.items()
            if name not in fields
            or fields[name].is_required()
            or getattr(part, name) != fields[name].get_default(call_default_factory=True)
        }
        if kept or section == "batch":
            short[section] = kept
    return short


def _gives(value: Mapping[str, Any], config: Config) -> bool:
    """Whether a document of these values gives this config."""
    try:
        loaded = load_document(Document(dict(value)), Tasks())
    except UserError:
        return False
    return flatten(loaded.config) == flatten(config)
