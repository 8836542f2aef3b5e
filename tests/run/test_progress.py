"""How far a process that describes a task has come is shown by the one that waits for it."""

import sys

import pytest

from samecurve.probe.progress import show_progress
from samecurve.terminal import PROGRESS, shown_progress


def test_what_another_process_says_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with shown_progress() as path:
        show_progress("data   1 of 2", {PROGRESS: path})
        show_progress("data   2 of 2", {PROGRESS: path})
    assert capsys.readouterr().err == "data   2 of 2\n"
    show_progress("data   alone", {})
    assert capsys.readouterr() == ("", "data   alone\n")


def test_a_terminals_line_is_written_over(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with shown_progress() as path:
        show_progress("data   2 of 2", {PROGRESS: path})
    assert capsys.readouterr().err == "\r\x1b[Kdata   2 of 2\n"
    with shown_progress():
        pass
    assert capsys.readouterr().err == ""
