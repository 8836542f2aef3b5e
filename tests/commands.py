"""Running the program as a user does: a process of its own, its output, its exit code."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from samecurve.checkpoint.format import load
from samecurve.checkpoint.store import newest
from samecurve.cli.main import main
from samecurve.observe import read_events
from warm_commands import Live, template

# of a rank that was forked, or started by itself
_RANKS = {"samecurve.processes.server", "samecurve.worker.rank_main"}
CONFIG = """\
model:
  {{hidden_size: 32, num_layers: 2, num_heads: 4, kv_heads: 2, intermediate_size: 48,
  max_seq_len: 16}}
data: {{source: {corpus}, validation: 0.1, eval_samples: 8, prompts: ["the "], sample_tokens: 8}}
batch: {{samples: 10}}
optimizer: {{lr: 3.0e-3, clip: 0.5}}
schedule: {{warmup: 5}}
train: {{steps: {steps}, precision: f64, save_every: {save}, eval_every: {save}, log_every: 10}}
"""


def write_config(home: Path, corpus: Path, steps: int = 60, save: int = 20) -> Path:
    path = home / "tiny.yaml"
    path.write_text(CONFIG.format(corpus=corpus, steps=steps, save=save))
    return path


def free_port() -> int:
    """One whose next is free too."""
    while True:
        with socket.socket() as first, socket.socket() as second, suppress(OSError):
            first.bind(("", 0))
            second.bind(("", first.getsockname()[1] + 1))
            return int(first.getsockname()[1])


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "samecurve", *map(str, arguments)]


def samecurve(
    *arguments: object,
    cwd: Path,
    code: int | None = 0,
    timeout: float = 120,
    afresh: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run to its end, forked from the template.

    code: the exit code it must have, None for any
    afresh: it imports its libraries itself, for a test that measures memory
    """
    words = command(*arguments)
    if sys.platform == "linux" and not afresh:
        done = template().run(words[3:], cwd, timeout)
    else:
        done = subprocess.run(
            words, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False
        )
    assert code is None or done.returncode == code, (
        f"exit {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    )
    return done


@contextmanager
def running(*arguments: object, cwd: Path, timeout: float = 120) -> Iterator[Live]:
    """A live command, forked from the template and ended with the block."""
    if sys.platform == "linux":
        with template().running(command(*arguments)[3:], cwd, timeout) as live:
            yield live
    else:
        with started(*arguments, cwd=cwd) as process:

            def end() -> subprocess.CompletedProcess[str]:
                output, _ = process.communicate(timeout=timeout)
                return subprocess.CompletedProcess(process.args, process.returncode, output, "")

            yield Live(process.pid, end)


def refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *arguments: object,
    cwd: Path,
) -> str:
    """What the program says when it refuses, run in this process (a start of its own each would
    take a minute in all); its exit code must be 2.
    """
    monkeypatch.chdir(cwd)
    monkeypatch.setattr(sys, "argv", ["samecurve", *map(str, arguments)])
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.raises(SystemExit) as left:
            main()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    shown = capsys.readouterr()
    assert left.value.code == 2, shown.err
    assert shown.out == ""
    assert "Traceback" not in shown.err
    return shown.err


@contextmanager
def started(
    *arguments: object, cwd: Path, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A live run, ended with the block whatever becomes of the test.

    env: variables beside this process's own.
    """
    with subprocess.Popen(
        command(*arguments),
        cwd=cwd,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def until(condition: Callable[[], Any], timeout: float = 90) -> Any:
    """The first true value of condition(), polled often, but for a quarter of a core at most."""
    deadline = time.monotonic() + timeout
    while True:
        begun = time.thread_time()
        if value := condition():
            return value
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(max(0.002, 3 * (time.thread_time() - begun)))


def losses(run: Path) -> list[float]:
    return [
        event.values["loss"] for event in read_events(run / "journal.jsonl") if event.kind == "step"
    ]


def steps_written(run: Path) -> int:
    try:
        return max(
            (event.step for event in read_events(run / "journal.jsonl") if event.kind == "step"),
            default=0,
        )
    except FileNotFoundError:
        return 0


def ranks_of(run: Path) -> list[int]:
    """Process ids of the ranks that work on this run, which are known by where they print to."""
    pids = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        with suppress(OSError, psutil.Error):  # it has ended
            output = Path(os.readlink(f"/proc/{process.pid}/fd/1"))
            if _RANKS & set(process.info["cmdline"] or []) and output.parent == run / "logs":
                pids.append(int(process.pid))
    return pids


def assert_same_run(run: Path, other: Path) -> None:
    """The same losses, and the same arrays in the last checkpoint."""
    np.testing.assert_allclose(losses(run), losses(other), rtol=1e-12)
    (first, _), (second, _) = newest(run / "checkpoints"), newest(other / "checkpoints")
    assert first is not None
    assert second is not None
    one, two = load(first).arrays, load(second).arrays
    for name in two:
        np.testing.assert_allclose(one[name], two[name], rtol=0, atol=1e-12, err_msg=name)
