"""After Ctrl-C under torchrun, our last line follows torchrun's traceback."""

import os
import subprocess
import sys

import pytest

from samecurve.launch.last_line import repeat_after_torchrun


def test_the_line_comes_when_torchrun_has_ended(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert repeat_after_torchrun("no terminal") is None
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    launcher = subprocess.Popen(["sh", "-c", "sleep 0.5; echo traceback >&2"])
    monkeypatch.setattr(os, "getppid", lambda: launcher.pid)
    waiting = repeat_after_torchrun("saved  runs/a")
    assert waiting is not None
    assert waiting.wait(20) == 0
    launcher.wait()
    assert capfd.readouterr().err == "traceback\nsaved  runs/a\n"
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert repeat_after_torchrun("another launcher") is None
