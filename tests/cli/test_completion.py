"""Completion in real shells: commands, options, their words, presets and names of files."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pexpect
import pytest
from click.shell_completion import BashComplete

from samecurve.cli.main import cli

PROGRAM = f"#!{sys.executable}\nfrom samecurve.cli.entry import run\n\nrun()\n"
# what is typed, and what a TAB makes of it
LINES = {
    "samecurve compa": "samecurve compare-runs ",
    "samecurve train --strategy fs": "samecurve train --strategy fsdp ",
    "samecurve train --dtype b": "samecurve train --dtype bf16 ",
    "samecurve train --new-b": "samecurve train --new-batch ",
    "samecurve train --engine j": "samecurve train --engine jax ",
    "samecurve train --mode j": "samecurve train --mode joint ",
    "samecurve init --preset gp": "samecurve init --preset gpt2-class-language-model ",
    "samecurve init --task tim": "samecurve init --task timeseries ",
    "samecurve init --launcher t": "samecurve init --launcher torchrun ",
    "samecurve eval --on he": "samecurve eval --on held-out ",
    "samecurve train -f conf": "samecurve train -f config-one.yaml ",
    "samecurve -f conf": "samecurve -f config-one.yaml ",
    "samecurve report ru": "samecurve report runs-here/",
    "samecurve train --standalone --gp": "",  # torchrun's flag is refused when the line is run
    "samecurve trian ": "",
}
SHELLS = {  # options, and what each reads at its start
    "bash": ("--norc", "--noprofile", 'eval "$(_SAMECURVE_COMPLETE=bash_source samecurve)"'),
    "zsh": (
        "-f",
        'autoload -Uz compinit; compinit -u; eval "$(_SAMECURVE_COMPLETE=zsh_source samecurve)"',
    ),
}
COMPLETED = {typed: line for typed, line in LINES.items() if line}
FEW = {typed: COMPLETED[typed] for typed in ("samecurve compa", "samecurve -f conf")}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("shell")
    (home / "config-one.yaml").touch()
    (home / "runs-here").mkdir()
    (home / "bin").mkdir()
    program = home / "bin/samecurve"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    return home


def environment(home: Path) -> dict[str, str]:
    path = f"{home / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "HOME": str(home), "TERM": "dumb", "INPUTRC": "/dev/null"}


def needs(shell: str) -> str:
    """The path of a shell; without it the test is skipped."""
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"{shell} is not installed here (apt-get install {shell})")
    return path


def test_what_each_line_completes_to(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the shells ask. A line that is wrong completes to nothing, and says nothing."""
    monkeypatch.chdir(home)
    asked = BashComplete(cli, {}, "samecurve", "_SAMECURVE_COMPLETE")
    for typed, line in LINES.items():
        *words, incomplete = typed.split(" ")[1:]
        items = asked.get_completions(words, incomplete)
        if items and items[0].type != "plain":
            assert "-here" in line or "config-one" in line, typed
            continue
        assert [item.value for item in items] == line.split()[-1:] or not line, typed


class Shell:
    """An interactive shell that has read the program's completion."""

    def __init__(self, home: Path, program: str, *arguments: str) -> None:
        *options, setup = arguments
        self._child = pexpect.spawn(
            program,
            options,
            cwd=str(home),
            env=environment(home),
            encoding="utf-8",
            dimensions=(40, 200),
            timeout=30,
        )
        self._child.delaybeforesend = None
        self._child.sendline(f"PS1='> '; {setup}; echo REA''DY")
        self._child.expect_exact("READY")

    def check(self, typed: str, line: str) -> None:
        """Type a line and TAB; it has to become another line."""
        self._child.send(f"{typed}\t")
        self._child.expect_exact(line)
        self._child.sendcontrol("u")

    def close(self) -> None:
        self._child.close(force=True)


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("bash", FEW),
        pytest.param("bash", COMPLETED, marks=pytest.mark.long, id="bash-all"),
        pytest.param("zsh", COMPLETED, marks=pytest.mark.long),
    ],
)
def test_a_tab_completes_the_line(home: Path, name: str, lines: Mapping[str, str]) -> None:
    shell = Shell(home, needs(name), *SHELLS[name])
    try:
        for typed, line in lines.items():
            shell.check(typed, line)
    finally:
        shell.close()


@pytest.mark.long
def test_fish_completes_the_line(home: Path) -> None:
    lines = "; ".join(f"echo LINE; complete -C '{typed}'" for typed in COMPLETED)
    done = subprocess.run(
        [needs("fish"), "-c", f"_SAMECURVE_COMPLETE=fish_source samecurve | source; {lines}"],
        cwd=home,
        env=environment(home),
        capture_output=True,
        text=True,
        check=True,
    )
    answers = done.stdout.split("LINE\n")[1:]
    for line, answer in zip(COMPLETED.values(), answers, strict=True):
        assert answer.split("\t")[0].split("\n")[0] == line.split()[-1], line
