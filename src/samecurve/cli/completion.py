"""What a shell completes: names of files, and the words that an option takes.

docs/completion.md says how a shell is told to ask.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem
from click.types import FuncParamType

Words = Callable[[], Iterable[str]]
Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]
# words of keys that take any text
_KNOWN = {"devices.use": ("auto", "all", "cpu", "cpu:2", "cpu:4")}
_FILES = {"data.source"}


class PlaceType(FuncParamType):  # type: ignore[type-arg]  # click 8.1 has it without arguments
    """An option's type that a function makes of a text which names a file or a folder."""

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        del ctx, param
        return [CompletionItem(incomplete, type="file")]


PATH = PlaceType(Path)


def words(give: Words, *, files: bool = False) -> Completer:
    """Complete an option with words. files: names of files too"""

    def complete(
        _context: click.Context, _parameter: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        fitting = [CompletionItem(word) for word in give() if word.startswith(incomplete)]
        if files and not fitting:
            return [CompletionItem(incomplete, type="file")]
        return fitting

    return complete


def words_of_key(key: str) -> Completer | None:
    """Complete an option with the words that a key of the config takes. None: it sets no key."""
    if not key:
        return None
    return words(lambda: _words_of(key), files=key in _FILES)


def task_names() -> tuple[str, ...]:
    """The tasks that have a name."""
    from samecurve.tasks import Tasks

    return Tasks().names()


def _words_of(key: str) -> Iterator[str]:
    """The words that the config lists for a key; a task's own field has those of all our tasks."""
    from samecurve.core.config.section import words_of
    from samecurve.core.config.sections import Config

    yield from _KNOWN.get(key, ())
    section, _, name = key.partition(".")
    kinds: list[Any] = [Config.model_fields[section].annotation]
    if not name:
        yield from words_of(kinds[0])
        return
    if section in {"model", "data"}:
        from samecurve.tasks import Tasks, built_in

        kinds = [getattr(Tasks().sections(task), section) for task in built_in()]
    fields = [kind.model_fields[name] for kind in kinds if name in kind.model_fields]
    yield from dict.fromkeys(word for field in fields for word in words_of(field.annotation))
