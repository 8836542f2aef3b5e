"""What anybody may have written (configs, data, exceptions) is shown so that it does nothing, and
takes one screen.
"""

import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest

from commands import refused
from samecurve.core.config.document import parse_document
from samecurve.core.config.loading import load_document
from samecurve.diagnose.notes import note_of
from samecurve.errors import InvalidConfigError, RunError, UserError, message_of
from samecurve.tasks import Tasks
from samecurve.terminal import cut_line, echo, printable, shorten, wrapped


def test_a_long_text_reaches_a_slow_reader_whole(tmp_path: Path) -> None:
    """Also unbuffered, and where another program has made the pipe non-blocking."""
    (tmp_path / "long.py").write_text(
        "import os, sys\n"
        "from samecurve.cli import main\n"
        "main._mend_streams()\n"
        "os.set_blocking(1, False)\n"
        "print('x' * 1_000_000)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-u", str(tmp_path / "long.py")], stdout=subprocess.PIPE
    ) as program:
        time.sleep(2)  # the pipe is full by then
        assert program.communicate(timeout=60)[0] == b"x" * 1_000_000 + b"\n"
    assert program.returncode == 0


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b]0;title\x07", "\\x1b[31mred\\x1b]0;title\\x07"),
        ("a\rb\x7f\x9b", "a\\rb\\x7f\\x9b"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("half \ud800 and byte \udcff", "half \\ud800 and byte \\udcff"),
        ("two\nlines\tand ünïcödé, \u65e5\u672c, \U0001f468\u200d\U0001f469", None),
    ],
)
def test_what_moves_a_terminal_is_shown_escaped(
    text: str, shown: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert printable(text) == (text if shown is None else shown)
    echo(text)
    assert capsys.readouterr().out == f"{printable(text)}\n"
    for error in (UserError(text, text, text), RunError(text, text, text)):
        assert printable(str(error)) == str(error)
        assert str(error).encode()


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("plan   torch ddp on 2 devices", 24, ["plan   torch ddp on 2", "       devices"]),
        ("  remedy: did you mean it?", 20, ["  remedy: did you", "    mean it?"]),
        ("saved  /a/path/that/is/longer", 24, ["saved", "  /a/path/that/is/longer"]),
        ("saved  /a/path/that/is/longer", 21, ["saved", "       /a/path/that/is/longer"]),
        ("fits exactly\n\nnext   one", 12, ["fits exactly", "", "next   one"]),
        ("a  b", 1, ["a", "b"]),
        ("       round (batch.samples, x", 20, ["       round", "     (batch.samples,", "     x"]),
    ],
)
def test_lines_break_between_words(text: str, width: int, lines: list[str]) -> None:
    assert wrapped(text, width).split("\n") == lines


@pytest.mark.parametrize(
    ("width", "line"),
    [(21, "load  475.8 MiB  host"), (20, "load  475.8 MiB …"), (12, "load …"), (4, "…")],
)
def test_one_line_is_cut_between_words(width: int, line: str) -> None:
    assert cut_line("load  475.8 MiB  host", width) == line


def test_a_long_text_keeps_its_begin_and_its_end() -> None:
    assert shorten("short\ntext", 20) == "short\ntext"
    cut = shorten("begin" + "x" * 5_000_000 + "the end", 100)
    assert cut.startswith("begin")
    assert "the end (5,000,012 characters in all)" in cut
    assert len(cut) < 200
    assert len(shorten("line\n" * 1_000_000, 10_000).splitlines()) <= 24


def test_a_failure_takes_one_screen() -> None:
    for text in ("A" * 5_000_000, "A\n" * 2_000_000):
        for error in (UserError(text, text, text), RunError(text, text, text)):
            assert len(str(error)) < 4500
            assert len(str(error).splitlines()) < 60
        assert len(note_of(0, ValueError(text)).cause) < 2000


def test_an_exception_that_can_not_be_told_is_told_of() -> None:
    class OddError(Exception):
        def __str__(self) -> str:
            raise ValueError("no")

    assert "can't be made: ValueError" in message_of(OddError())
    assert "OddError: (its own text" in note_of(1, OddError()).cause
    assert "OddError" in "".join(traceback.format_exception_only(OddError()))


def test_fifteen_thousand_bad_keys() -> None:
    """They took a minute, and 30,000 lines."""
    text = "batch: {samples: 8}\ntrain:\n" + "".join(f"  k{n}: 1\n" for n in range(15_000))
    with pytest.raises(InvalidConfigError) as refusal:
        load_document(parse_document(text, "c.yaml"), Tasks())
    lines = str(refusal.value).splitlines()
    assert lines[-1] == "and 14988 more like these"
    assert len(lines) < 40


def test_halves_of_characters() -> None:
    """JSON writes a character beyond 65535 in two halves; half of one is no text."""
    assert parse_document('{"a": "\\ud83d\\ude00"}', "c.json").value == {"a": "\U0001f600"}
    for text in ('{"a": "\\ud83d"}', '{"\\ude00": 1}'):
        with pytest.raises(UserError, match="half a character"):
            parse_document(text, "c.json")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["sample", "run", "--prompt", "a\udcffb"], "a\\udcffb is not UTF-8 text"),
        (["export", "run", "--to", "\udc80"], "\\udc80 is not UTF-8 text"),
        (["train", "--set", "task=\udc80"], "is not UTF-8 text"),
        (["sample", "run", "--temperature", "nan"], "nan is no number"),
        (["eval", "\x1b[2Jrun"], "\\x1b[2Jrun is neither a run directory"),
        (["train", "--no-\x1b[2J"], "\\x1b[2J"),
        (["plan", "-f", "/dev/zero"], "more than 1048576 bytes"),
        (["eval", "x" * 300], "File name too long"),
        (["report", "x" * 300], "File name too long"),
        (["compare-runs", "x" * 300, "y"], "File name too long"),
    ],
)
def test_arguments_of_any_bytes(
    arguments: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert says in refused(monkeypatch, capsys, *arguments, cwd=tmp_path)
    assert sys.stderr is not None
