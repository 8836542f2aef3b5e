"""Every command line of every page: its verb and flags are there, its config is read and planned,
and what the page shows of a plan or a refusal is what is printed, on a machine as pages have it.

Nothing is trained here. Lines that need GPUs are planned on a machine of eight.
"""

import contextlib
import difflib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from page_commands import (
    FENCE,
    NAMES,
    PAGES,
    ROOT,
    Line,
    borrowed_files,
    fenced_lines,
    parsed,
    shown_files,
    words_after_samecurve,
)
from samecurve.cli.main import all_verbs, find_verb, main
from samecurve.cli.options import dashes
from samecurve.core.config.sections import Config
from samecurve.core.planning.machine import Device, Machine
from samecurve.run import describe, prepare
from samecurve.tasks import entry_of
from samecurve_products import text_files

MACHINE = Machine(devices=(), links=(), host_bytes=int(23.53 * 2**30), cores=2, cpu="AMD EPYC")
GPUS = Machine(
    devices=tuple(
        Device(kind="cuda", index=index, name="NVIDIA H200", memory=140 << 30) for index in range(8)
    ),
    links=(),
    host_bytes=1 << 40,
    cores=128,
)
# whose plans take seconds: billions of weights, or a model that jax or diffusers traces
SLOW = {"huggingface-memory", "vision", "diffusion"}
PLANNED = {"train", "plan", "verify", "bench", "profile"}
Neutral = Callable[[str], str]  # a line without what may differ
# in lines that are no command yet: what stands for what
PLACEHOLDERS = {"FILE": "models/tiny.yaml", "C": "models/tiny.yaml", "N": "2"}
UNFINISHED = (click.MissingParameter, click.BadOptionUsage)
# flags of srun, of scripts and of a benchmark; those of every verb
OF_BENCHMARKS = {"--sides", "--micro", "--limit", "--no-golden"}
OF_OTHERS = {
    "--ntasks-per-node",
    "--gpus-per-task",
    "--local-rank",
    "--local-addr",
    *OF_BENCHMARKS,
    "--no-deps",  # of pip
    *("--build-arg", "--device", "--group-add", "--shm-size", "--gpus"),  # of docker
    *("--porcelain", "--exit-code"),  # of git
    "--help",
    "--version",
}
OF_PLAN = ("plan   ", "       ", "warn   ", "error: ", "  remedy: ", "note   ")


def inline_lines(page: Path) -> Iterator[Line]:
    """Those in a paragraph or a table; FILE, RUN and their like stand for something."""
    text = page.read_text()
    text = re.sub(r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), text, flags=FENCE)
    for match in re.finditer(r"`([^`\n]+)`", text):
        words = words_after_samecurve(match[1])
        if words and words[0] in all_verbs() and "..." not in words:
            number = text.count("\n", 0, match.start()) + 1
            yield Line(page, number, [PLACEHOLDERS.get(word, word) for word in words], [], True)


def write_files(page: Path, home: Path) -> None:
    """What its lines read: of this page, and of the pages that it takes files from."""
    for name, content in (borrowed_files(page) | shown_files(page)).items():
        (home / name).write_text(content)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are described here, where torch is imported already, and not in a process each."""

    def described(config: Config, cache: Path, _server: object) -> dict[str, Any]:
        return entry_of(config.task).facts(config, cache).to_json()

    monkeypatch.setattr(describe, "_in_subprocess", described)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with what the repository's root has, and with the files that pages show."""
    for name in ("models", "examples", "README.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "docs").mkdir()  # a line draws a picture there
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name, marks=[pytest.mark.long] if page.stem in SLOW else [])
        for page, name in zip(PAGES, NAMES, strict=True)
    ],
)
def test_lines_are_planned_as_the_page_shows(
    page: Path,
    *,
    home: Path,
    in_this_process: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """python-stdlib is a smaller text here: what follows from a vocabulary that is learnt from it
    (sizes, times) is compared without its numbers.
    """
    del in_this_process
    text = sorted((ROOT / "src/samecurve/core").rglob("*.py"))
    monkeypatch.setattr(text_files, "standard_library", lambda: text)
    wrong = faults_of(page, home, monkeypatch, capsys, may_learn=False)
    assert not wrong, "\n".join(wrong)


@pytest.mark.long
@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_number_of_a_plan_is_as_the_page_shows(
    page: Path,
    *,
    home: Path,
    in_this_process: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On the text that the page had, but for its length, which differs with Python's version."""
    del in_this_process
    wrong = faults_of(page, home, monkeypatch, capsys, may_learn=True)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_flags_that_a_page_names_are_there(page: Path) -> None:
    """In paragraphs and tables; the first column of a page for other tools has theirs."""
    verbs = [command for name in all_verbs() for command in commands_of(find_verb(name))]
    known = {
        name
        for verb in verbs
        for option in verb.params
        for name in (*option.opts, *option.secondary_opts)
    }
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=FENCE)
    if page.name.startswith("coming-from"):
        text = re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE)
    codes = re.findall(r"`([^`]+)`", text)
    flags = {dashes(name) for code in codes for name in re.findall(r"(?:^| )(--[a-z][\w-]*)", code)}
    assert flags - known <= OF_OTHERS


def commands_of(verb: click.Command) -> list[click.Command]:
    """The verb, and the verbs that it has of its own (`samecurve data show`)."""
    return [verb, *(verb.commands.values() if isinstance(verb, click.Group) else ())]


def test_the_readme_shows_a_class_as_it_ships() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), flags=FENCE)
    assert len(blocks) == 1
    assert blocks[0] in (ROOT / "examples/my_task.py").read_text()


def test_a_page_that_has_rotted_is_found() -> None:
    text = "plan   world 3   ddp   f32\n       batch 6\n"
    for shown, faults in (
        (["plan   world 3   ...", "...", "       batch 6"], 0),
        (["plan   world 2   ..."], 1),
        (["       batch 6", "plan   world 3   ..."], 1),
        (["error: anything"], 1),
    ):
        line = Line(PAGES[0], 1, ["plan"], shown)
        assert len(list(compared(line, text, without_length))) == faults
    for words in (["train", "-f", "x.yaml", "--no-such-flag"], ["trian", "-f", "x.yaml"]):
        with pytest.raises(click.UsageError):
            parsed(words)


def faults_of(
    page: Path,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    may_learn: bool,
) -> list[str]:
    """A text for each line that is not as its page says.

    may_learn: whether the text is the one that a page's vocabularies were learnt from
    """
    write_files(page, home)
    wrong = []
    for line in (*fenced_lines(page), *inline_lines(page)):
        place = f"{page.relative_to(ROOT)}:{line.number}"
        try:
            flags = parsed(line.words)
        except click.ClickException as error:
            if not line.is_mention or not isinstance(error, UNFINISHED):
                wrong.append(f"{place}: {error.format_message()}")
            continue
        missing = missing_files(flags)
        if line.words[0] == "convert" and flags["old"].exists():
            text = said(line.words, monkeypatch, capsys, errors_last=True)
            wrong += [f"{place}: {fault}" for fault in compared(line, text, str)]
        if missing or not is_planned(line, flags):
            continue
        needs_gpus = bool(flags.get("gpus") or flags.get("num_gpus")) and not line.shown
        monkeypatch.setattr(prepare, "probe", lambda on=needs_gpus: GPUS if on else MACHINE)
        arguments = as_plan(line.words) if flags["file"] else line.words
        text = said(arguments, monkeypatch, capsys)
        learns = flags["file"] is not None and "bpe:" in flags["file"].read_text()
        neutral = without_length if may_learn or not learns else without_numbers
        wrong += [f"{place}: {fault}" for fault in compared(line, text, neutral)]
    return wrong


def is_planned(line: Line, flags: dict[str, Any]) -> bool:
    """Whether a line has a config, or lacks one, and can be planned here and without measuring."""
    measures = flags.get("probe_batch") or flags.get("balance") == "measured"
    alone = flags.get("nnodes", "1") == "1"
    has_config = flags.get("file")
    if line.words[0] in {"train", "plan"}:
        has_config = has_config or not (line.is_mention or flags["settings"])
    return line.words[0] in PLANNED and bool(has_config) and alone and not measures


def missing_files(flags: dict[str, Any]) -> set[str]:
    """Those that a line reads and that are not there."""
    tasks = [each for each in flags.get("settings") or () if each.startswith("task=")]
    names = [task.removeprefix("task=").partition(":")[0] for task in tasks]
    names += [
        str(flags[name]) for name in ("file", "data", "init_from", "bench") if flags.get(name)
    ]
    return {name for name in names if not Path(name).exists()}


def as_plan(words: list[str]) -> list[str]:
    """The same for `plan`: without what only the verb itself has."""
    plan, verb = find_verb("plan"), find_verb(words[0])
    known = {name for parameter in plan.params for name in parameter.opts}
    other = {
        name: parameter
        for parameter in verb.params
        for name in parameter.opts
        if name not in known and isinstance(parameter, click.Option)
    }
    kept, rest = ["plan"], words[1:]
    while rest:
        word, *rest = rest
        option = other.get(word.partition("=")[0].replace("_", "-"))
        if option is None:
            kept.append(word)
        elif not option.is_flag and "=" not in word:
            rest = rest[1:]
    return kept


def said(
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    errors_last: bool = False,
) -> str:
    monkeypatch.setattr(sys, "argv", ["samecurve", *arguments])
    with contextlib.suppress(SystemExit):
        main()
    shown = capsys.readouterr()
    return shown.out + shown.err if errors_last else shown.err + shown.out


def compared(line: Line, text: str, neutral: Neutral) -> Iterator[str]:
    """What the page shows and the program does not say."""
    if not line.shown:
        if "error:" in text:
            yield text
        return
    actual = list(map(neutral, text.splitlines()))
    at = 0
    for shown in to_compare(line, text):
        pattern = re.compile(
            ".*".join(map(re.escape, neutral(shown.replace("...", "\0")).split("\0")))
        )
        places = [number for number in range(at, len(actual)) if pattern.fullmatch(actual[number])]
        if not places:
            near = difflib.get_close_matches(neutral(shown), actual, 1, 0.3)
            yield f"shown  {neutral(shown)}\n    printed  {near[0] if near else text}"
            return
        at = places[0] + 1


def to_compare(line: Line, text: str) -> list[str]:
    """The lines below a command that a plan, or a refusal, has."""
    shown = [each for each in line.shown if each not in {"...", ""}]
    if line.words[0] in {"plan", "convert"}:
        return shown
    if any(each.startswith("error: ") for each in shown) and "error: " not in text:
        return []  # refused, or failed, by its ranks
    first = [number for number, each in enumerate(shown) if not each.startswith(OF_PLAN)]
    head = shown[: first[0]] if first else shown
    if any(each.startswith("resume ") for each in shown) or "(kept from the run's start)" in str(
        shown
    ):
        return [each for each in head if each.startswith("plan ")]
    return head


def without_length(line: str) -> str:
    """Of the text, which differs with Python's version."""
    line = re.sub(r"(an epoch is) \d+", r"\1 N", line)
    return re.sub(r"\d+ (steps an epoch)", r"N \1", line)


def without_numbers(line: str) -> str:
    return re.sub(r" +", " ", re.sub(r"[\d.]+[KMGTB]?", "N", line))
