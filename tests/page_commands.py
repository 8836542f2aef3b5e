"""The commands that a page shows, the marks beside them, and the files that the page shows.

A page is read from top to bottom. A command that cannot be run here says so in a comment at its
end, in one of these forms (a colon and free words may follow):

    # needs a GPU                  what this machine may lack: see WORLD
    # needs your my.yaml           a file that the reader has and the page does not show
    # takes 2 minutes              longer than the tests of every change may take
    # runs until Ctrl-C
"""

import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import click

from samecurve.cli.main import all_verbs, cli, find_verb

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("docs/*.md")), ROOT / "README.md", ROOT / "examples/README.md"]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
FENCE = re.DOTALL | re.MULTILINE
# what a command may need beside files
WORLD = re.compile(
    r"a GPU|\d+ GPUs|AMD GPUs|a second machine|a network|Docker|Slurm|SkyPilot|Kubernetes|Ray"
    r"|a bucket|a terminal|another terminal|a checkout|a model"
)
MARK = re.compile(r"needs (?P<needs>[^:]+)|takes (?P<minutes>\d+) minutes?|runs until Ctrl-C")
_PROGRAMS = "samecurve|torchrun|python|pip|make|docker|srun|sbatch|sky|wandb|mlflow|tensorboard"
_COMMAND = re.compile(rf"(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?(?:{_PROGRAMS}|trackio) ")
_PROMPT = re.compile(r"\w*\$ ")


class Line(NamedTuple):
    """A command of this program that a page shows, and what the page shows below it."""

    page: Path
    number: int
    words: list[str]  # after `samecurve`
    shown: list[str]
    is_mention: bool = False  # in a paragraph or a table: it may lack arguments and files


class Mark(NamedTuple):
    """What the comment beside a command says."""

    things: tuple[str, ...] = ()  # of WORLD
    files: tuple[str, ...] = ()  # the reader's own
    minutes: int = 0
    is_endless: bool = False

    @property
    def keeps_it_from_running(self) -> bool:
        return bool(self.things or self.files or self.is_endless or self.minutes > 10)


class Command(NamedTuple):
    """A command line of any program in a block of a page."""

    page: Path
    number: int
    text: str  # without its prompt and its comment
    comment: str
    shown: list[str]
    at: int  # of its block in the page's text

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.number}"

    @property
    def mark(self) -> Mark:
        """ValueError: the comment begins as a mark does, and is none."""
        first = self.comment.partition(":")[0].strip()
        if not re.match(r"(needs|takes|runs) ", first):
            return Mark()
        match = MARK.fullmatch(first)
        if not match:
            raise ValueError(f"'# {first}' is no mark: tests/page_commands.py lists them")
        names = re.split(r", | and ", (match["needs"] or "").removeprefix("your "))
        things = [name for name in names if WORLD.fullmatch(name)]
        files = [name for name in names if name and name not in things]
        for name in files:
            if name not in self.text:
                raise ValueError(f"'# needs {name}': neither in WORLD nor in the command")
        return Mark(
            tuple(things), tuple(files), int(match["minutes"] or 0), first == "runs until Ctrl-C"
        )


def commands_of_text(page: Path, text: str) -> Iterator[Command]:
    """The commands of blocks without a language, or with that of a shell, in their order."""
    for block in re.finditer(r"^```(\w*)\n(.*?)^```", text, flags=FENCE):
        if block[1] not in {"", "sh", "bash", "console"}:
            continue
        first, lines = text.count("\n", 0, block.start()) + 2, block[2].splitlines()
        begins = _PROMPT if any(map(_PROMPT.match, lines)) else _COMMAND
        places = [at for at, line in enumerate(lines) if begins.match(line)]
        for at, end in pairwise([*places, len(lines)]):
            line, below = _PROMPT.sub("", lines[at], count=1), lines[at + 1 : end]
            while line.endswith("\\"):
                line = line[:-1] + below[0].strip()
                below = below[1:]
            typed, _, comment = line.partition(" # ")
            yield Command(page, first + at, typed.strip(), comment.strip(), below, block.start())


def commands(page: Path) -> Iterator[Command]:
    return commands_of_text(page, page.read_text())


def fenced_lines(page: Path) -> Iterator[Line]:
    """The commands of this program in the blocks of a page."""
    for command in commands(page):
        words = words_after_samecurve(command.text)
        if words is not None:
            yield Line(page, command.number, words, command.shown)


def words_after_samecurve(text: str) -> list[str] | None:
    """The words of a command of this program; None: of another one."""
    match = re.match(
        r"(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?samecurve (.*)|(?:torchrun|srun) .*-m samecurve (.*)",
        text,
    )
    if not match:
        return None
    words = shlex.split(match[1] or match[2], comments=True)
    for stop in (">", "|", "&", "&&", ";"):
        if stop in words:
            words = words[: words.index(stop)]
    return words


def shown_files(page: Path, before: int | None = None, text: str | None = None) -> dict[str, str]:
    """The blocks of a page that are a file: the line above ends with its name.

    before: only those above this place in the text
    text: of the page, if not what the file holds
    """
    text = (page.read_text() if text is None else text)[:before]
    blocks = re.finditer(r"`([\w.]+)`:\n\n```\w+\n(.*?)^```", text, flags=FENCE)
    return {block[1]: block[2] for block in blocks}


def borrowed_files(page: Path) -> dict[str, str]:
    """The files that a page takes from another one, and those that these name.

    The page says so: "`small.yaml` of [train.md](train.md)", "`small.yaml` is that of ...".
    """
    found: dict[str, str] = {}
    sentence = r"`([\w.]+)` (?:is (?:the config|that) )?of \[(\w[\w-]*\.md)\]"
    for name, other in re.findall(sentence, page.read_text()):
        files = shown_files(page.parent / other)
        found[name] = files[name]
        found |= {beside: text for beside, text in files.items() if is_named(beside, found[name])}
    return found


def is_named(name: str, text: str) -> bool:
    return bool(re.search(rf"(?<![\w/]){re.escape(name)}(?!\w)", text))


def parsed(words: list[str]) -> dict[str, Any]:
    """The flags by name. ClickException: the verb has no such flag."""
    if words[0] not in all_verbs():
        raise click.UsageError(f"there is no verb {words[0]}")
    command = find_verb(words[0])
    if isinstance(command, click.Group) and len(words) > 1:
        if words[1] not in command.commands:
            raise click.UsageError(f"there is no verb {words[0]} {words[1]}")
        command, words = command.commands[words[1]], words[1:]
    with cli.make_context("samecurve", [words[0]], resilient_parsing=True) as parent:
        return command.make_context(words[0], list(words[1:]), parent=parent).params
