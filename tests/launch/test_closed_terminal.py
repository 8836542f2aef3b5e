"""A terminal that is closed asks a run to stop; `nohup` keeps it running. Ranks have names."""

import os
import pty
import signal
from pathlib import Path

import psutil
import pytest

from commands import command, ranks_of, steps_written, until, write_config
from samecurve.checkpoint.store import checkpoints
from samecurve.observe import read_events


def names_of(pids: list[int]) -> list[str]:
    """The names that `ps` and nvidia-smi show; `top` shows `samecurve-rank1`."""
    processes = [psutil.Process(pid) for pid in pids]
    assert {process.name() for process in processes} == {"samecurve-rank0", "samecurve-rank1"}
    return [process.cmdline()[0] for process in processes]


@pytest.mark.parametrize(
    ("devices", "nohup"),
    [("cpu", False), pytest.param("cpu:2", True, marks=pytest.mark.long)],
    ids=["closed", "nohup"],
)
def test_a_closed_terminal(*, devices: str, nohup: bool, tmp_path: Path, corpus: Path) -> None:
    config, run = write_config(tmp_path, corpus, steps=10**6, save=10**6), tmp_path / "run"
    line = command("train", "-f", config, "--save-dir", run, "--devices", devices)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        # whatever started the tests may have it ignored
        signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
        os.execv(line[0], line)
    try:
        until(lambda: os.read(terminal, 1 << 16) and steps_written(run) > 3)
        os.close(terminal)  # the kernel sends SIGHUP
        if nohup:
            assert sorted(names_of(ranks_of(run))) == ["samecurve rank 0", "samecurve rank 1"]
            written = steps_written(run)
            until(lambda: steps_written(run) > written + 30)
            os.kill(pid, signal.SIGTERM)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise
    assert status == (143 if nohup else 129)
    assert read_events(run / "journal.jsonl")[-1].kind == "stopped"
    [saved] = checkpoints(run / "checkpoints")
    assert saved.name == f"step-{steps_written(run):08d}"
    until(lambda: not ranks_of(run), timeout=10)
