"""What a shell completes: names of files, and the words that an option takes.

docs/commands.md says how a shell is told to ask.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import click
from click.shell_completion import CompletionItem

Words = Callable[[], Iterable[str]]
Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]
# words of keys that take any text
_KNOWN = {"devices.use": ("auto", "all", "cpu", "cpu:2", "cpu:4")}
_FILES = {"data.source"}


def file(incomplete: str) -> list[CompletionItem]:
    """Have the shell complete the name of a file."""
    return [CompletionItem(incomplete, type="file")]


def words(give: Words, *, files: bool = False) -> Completer:
    """Complete an option with words. files: names of files too"""

    def complete(
        _context: click.Context, _parameter: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        fitting = [CompletionItem(word) for word in give() if word.startswith(incomplete)]
        if files and not fitting:
            return file(incomplete)
        return fitting

    return complete


def words_of_key(key: str) -> Completer:
    """Complete an option with the words that a key of the config takes."""
    return lambda _context, _parameter, incomplete: complete_key(key, incomplete)


def complete_key(key: str, incomplete: str) -> list[CompletionItem]:
    """The words, of those that a key of the config takes, with this beginning; or a file's name."""
    fitting = [CompletionItem(word) for word in _words_of(key) if word.startswith(incomplete)]
    return file(incomplete) if key in _FILES and not fitting else fitting


def task_names() -> tuple[str, ...]:
    """The tasks that have a name."""
    from samecurve.tasks import Tasks

    return Tasks().names()


def _words_of(key: str) -> Iterator[str]:
    """The words that the config lists for a key; a task's own field has those of all our tasks."""
    from samecurve.core.config import words_of
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
