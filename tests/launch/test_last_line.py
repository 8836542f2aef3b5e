"""After Ctrl-C under torchrun, our last line follows torchrun's traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest

from commands import write_config
from samecurve.launch.last_line import repeat_after_torchrun
from samecurve.observe import read_events
from samecurve.processes import wait_for


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
    assert wait_for([waiting], 20)
    assert waiting.wait() == 0
    launcher.wait()
    assert capfd.readouterr().err == "traceback\nsaved  runs/a\n"
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert repeat_after_torchrun("another launcher") is None


@pytest.mark.long
@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_ctrl_c_under_torchrun(engine: str, tmp_path: Path, corpus: Path) -> None:
    """Our line comes last, and no line comes once for each rank."""
    config = write_config(tmp_path, corpus, steps=10**6, save=10**6)
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node=2"]
    words = [*torchrun, "-m", "samecurve", "train", "-f", str(config)]
    terminal = pexpect.spawn(
        sys.executable,
        [*words, "--devices", "cpu:2", "--engine", engine, "--save-dir", "run"],
        cwd=str(tmp_path),
        timeout=90,
        dimensions=(30, 200),
        encoding="utf-8",
    )
    terminal.expect("step   [0-9]+/1000000")
    terminal.sendintr()
    terminal.expect(pexpect.EOF)
    shown = str(terminal.before)
    terminal.close()
    assert shown.splitlines()[-1] == "saved  run; the same command goes on from there"
    assert shown.count("SignalException: ") == 1  # torchrun's own, above it
    assert shown.count("stopping at the end of this step") <= 1
    assert read_events(tmp_path / "run" / "journal.jsonl")[-1].kind == "stopped"
