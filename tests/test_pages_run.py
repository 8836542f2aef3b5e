"""Every page runs from top to bottom: its commands in their order, in one empty directory.

Commands whose page says that they need something else (a GPU, a second machine, a file of the
reader's own) are not run. Without running anything, every page is held to this: what a command
reads was shown above, made by a command above, or ships with the project.
"""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from commands import samecurve
from page_commands import (
    NAMES,
    PAGES,
    ROOT,
    Command,
    Line,
    borrowed_files,
    commands,
    commands_of_text,
    parsed,
    shown_files,
    words_after_samecurve,
)
from test_pages import compared

# of a clone; docs, too, to read only
SHIPPED = ("models", "examples", "scripts", "benchmarks", "README.md", "LICENSE")
FAST = {"docs/convert.md", "docs/groups.md", "docs/commands.md"}  # the others: make test-long
READ = ("file", "data", "init_from", "bench", "run", "runs", "first", "second", "old", "script")
WRITTEN = ("save_dir", "to", "trace", "directory", "new", "chart")
SETTINGS = ("task=", "model.path=", "data.source=", "data.tokenizer=")
NO_FILES = {"python-stdlib", "auto", "bpe"}  # data and tokenizers by their names
# what a shell does, what measures memory, and what shows how it was started
AFRESH = {">", "|", "&&", ";", "--probe-batch", "run", "init"}
# verbs whose output is the machine's or the model's own; lines that come when a run is slow, or
# that follow the memory of each try
MEASURING = {"bench", "check", "profile", "sample"}
INCIDENTAL = ("...", "  | ", "load   ", "slow   ", "probe  ")
INSTALLERS = {"pip", "make"}  # they change the environment that the tests run in
TRACKERS = ("wandb", "mlflow", "trackio")  # which the tests' environment may lack


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_what_a_command_reads_is_shown_made_or_shipped(page: Path) -> None:
    faults = list(faults_of(page, list(commands(page)), borrowed_files(page)))
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name, marks=[] if name in FAST else [pytest.mark.long])
        for page, name in zip(PAGES, NAMES, strict=True)
        if any(True for _ in commands(page))
    ],
)
def test_a_page_runs_from_top_to_bottom(page: Path, tmp_path: Path) -> None:
    """Each command ends as the page shows, and prints what the page shows, but for numbers."""
    for name in SHIPPED:
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "docs").mkdir()
    (tmp_path / ".venv").symlink_to(sys.prefix)  # as the README's lines begin
    faults, left_out = [], []
    for command in commands(page):
        for name, text in (borrowed_files(page) | shown_files(page, command.at)).items():
            if not (tmp_path / name).exists():
                (tmp_path / name).write_text(text)
        if command.mark.keeps_it_from_running or command.text.split()[0] in INSTALLERS:
            continue
        if missing := missing_tracker(command):
            left_out.append(f"{command.place} ({missing} is not installed)")
            continue
        faults += [f"{command.place}: {fault}" for fault in faults_of_run(command, tmp_path)]
    assert not faults, "\n".join(faults)
    if left_out:
        pytest.skip(f"all other commands were run: {', '.join(left_out)}")


def test_a_command_that_would_fail_for_the_reader_is_found() -> None:
    """Files that nobody made, runs that are another one's, marks that say too much or nothing."""
    page = """\
`here.yaml`:

```yaml
task: language
```

```
$ samecurve train -f here.yaml --save-dir runs/a
$ samecurve eval runs/a
$ samecurve train -f there.yaml
$ samecurve train -f models/tiny.yaml --save-dir runs/a
$ samecurve sample RUN
$ samecurve train -f models/tiny.yaml --save-dir runs/b  # needs 2 GPUs
$ samecurve eval runs/b
$ samecurve train -f mine.yaml  # needs your mine.yaml: any config
$ samecurve train -f here.yaml  # needs your here.yaml
$ samecurve train -f models/tiny.yaml  # needs luck
$ samecurve train -f late.yaml
```

`late.yaml`:

```yaml
task: language
```
"""
    faults = list(faults_of(PAGES[0], list(commands_of_text(PAGES[0], page)), {}, page))
    assert [(int(fault.split(":")[1]), fault.split(": ", 1)[1]) for fault in faults] == [
        (10, "there.yaml: neither shown above, nor made by a command above, nor shipped"),
        (11, "runs/a was begun with here.yaml"),
        (12, "RUN: neither shown above, nor made by a command above, nor shipped"),
        (14, "runs/b: neither shown above, nor made by a command above, nor shipped"),
        (16, "here.yaml is there, so the mark is wrong"),
        (17, "'# needs luck': neither in WORLD nor in the command"),
        (18, "late.yaml: neither shown above, nor made by a command above, nor shipped"),
    ]


def test_a_command_that_ends_or_prints_otherwise_is_found(tmp_path: Path) -> None:
    page = """\
```
$ samecurve schema --table > keys.md
$ samecurve plan -f none.yaml
error: -f: there is no config file none.yaml
$ samecurve plan -f none.yaml
$ samecurve plan -f none.yaml
error: there is a config file none.yaml
$ python -c "print(7, 'steps in 2m05s')"
12 steps in 31.5 s
```
"""
    lines = list(commands_of_text(PAGES[0], page))
    found = [[fault.split("\n")[0] for fault in faults_of_run(line, tmp_path)] for line in lines]
    shown = ["shown  error: there is a config file none.yaml"]
    assert found == [[], [], ["exit 2"], shown, []]


def faults_of(
    page: Path, lines: list[Command], borrowed: dict[str, str], text: str | None = None
) -> Iterator[str]:
    """What a reader would stumble over who types the commands of a page in their order."""
    made: dict[str, str] = {}  # and for a run: its config
    for command in lines:
        try:
            mark = command.mark
        except ValueError as error:
            yield f"{command.place}: {error}"
            continue
        there = borrowed | shown_files(page, command.at, text) | made
        read, written, config = files_of(command, there)
        for name in sorted(read):
            if name in mark.files:
                if is_there(name, there):
                    yield f"{command.place}: {name} is there, so the mark is wrong"
            elif not is_there(name, there) and not mark.things:
                yield (
                    f"{command.place}: {name}: neither shown above, nor made by a command above,"
                    " nor shipped"
                )
        for name in written:
            if config and made.get(name, config) != config:
                yield f"{command.place}: {name} was begun with {made[name]}"
            if not mark.keeps_it_from_running:
                made.setdefault(name, config)


def is_there(name: str, there: dict[str, str]) -> bool:
    if name.split("/", maxsplit=1)[0] in {*SHIPPED, "docs"} and (ROOT / name).exists():
        return True
    parts = Path(name).parts
    ours = {"/".join(parts[:length]) for length in range(1, len(parts) + 1)}
    return bool(ours & there.keys()) or any(Path(name) in Path(other).parents for other in there)


def files_of(command: Command, there: dict[str, str]) -> tuple[set[str], set[str], str]:
    """What a command reads, what it writes, and the config of the run that it writes.

    there: the files above, by their names; a script that is shown names what it writes in quotes
    """
    words = words_after_samecurve(command.text)
    redirected = set(re.findall(r" (?:>|--write) (\S+)", command.text))
    if words is None:
        script = re.match(r"(?:python|torchrun) (?:-\S+ )*(\S+\.py)\b", command.text)
        if script is None:
            return set(), redirected, ""
        quoted = re.findall(r'"([\w./]+\.\w+)"', there.get(script[1], ""))
        return {script[1]}, {*redirected, *quoted}, ""
    try:
        flags = parsed(words)
    except click.ClickException:
        return set(), redirected, ""  # test_pages.py names it
    settings = flags.get("settings") or ()
    read = {
        setting.removeprefix(key).split(":")[0]
        for setting in settings
        for key in SETTINGS
        if setting.startswith(key)
    }
    read |= {str(value) for name in READ for value in several(flags.get(name))}
    written = {str(value) for name in WRITTEN for value in several(flags.get(name))}
    if words[0] == "train" and flags["resume"] not in {None, "auto", "never"}:
        read.add(str(flags["resume"]))
    tasks = [setting for setting in settings if setting.startswith("task=")]
    config = " ".join([str(flags.get("file") or ""), *tasks]) if words[0] == "train" else ""
    local = {name for name in read if "://" not in name and not name.startswith("/")}
    return local - NO_FILES, written | redirected, config.strip()


def several(value: object) -> tuple[object, ...]:
    if not value:
        return ()
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def missing_tracker(command: Command) -> str | None:
    for name in TRACKERS:
        if f"--{name}" in command.text and importlib.util.find_spec(name) is None:
            return name
    return None


def faults_of_run(command: Command, home: Path) -> Iterator[str]:
    words = shlex.split(command.text)
    begun = time.monotonic()
    timeout = 900 + 180 * command.mark.minutes  # seconds; the machine may be busy
    if words[0] == "samecurve" and not AFRESH & {*words}:
        done = samecurve(*words[1:], cwd=home, code=None, timeout=timeout)
    else:
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        done = subprocess.run(
            ["bash", "-c", command.text],
            cwd=home,
            env={**env, "PATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
    err = done.stderr or ""
    print(f"{time.monotonic() - begun:.0f} s  {command.place}  {command.text}")
    fails = any(re.match(r"(error: |FAIL |differ )", line) for line in command.shown)
    if fails != (done.returncode != 0):
        yield f"exit {done.returncode}\n{done.stdout[-1500:]}\n{err[-1500:]}"
        return
    if words[0] == "samecurve" and MEASURING & {*words[1:2]} and not fails:
        return
    shown = [line for line in command.shown if not line.startswith(INCIDENTAL) and line]
    line = Line(command.page, command.number, ["plan"], shown)
    out, err = (text.replace(f"{ROOT}/", "") for text in (done.stdout, err))  # links lead there
    orders = (out + err, err + out)
    faults = [list(compared(line, text, without_measures)) for text in orders] if shown else [[]]
    yield from min(faults, key=len)


def without_measures(line: str) -> str:
    """Without numbers, their units and hashes, which differ with the machine."""
    line = re.sub(r"\b([0-9a-f]{12}|[0-9a-f]{16}|\d{8}-\d{6})\b", "N", line)
    line = re.sub(r"\b(\d+h)?\d+m\d+s\b", "N", line)
    number = r"\d[\d.]*(e[-+]?\d+)?"
    line = re.sub(rf"{number}( ?(ms|s|m|min|h|[KMGT]iB|B|[kMGT]))?(?!\w)", "N", line)
    line = re.sub(r" +", " ", line)
    return line.replace(" N TFLOP/s", "")  # a fast machine's only: a small figure is not shown
