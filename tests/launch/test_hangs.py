"""A rank that hangs, is stopped or killed is named within its limit, ended, and the run goes on
from its last save as if nothing had been.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commands import command, losses, ranks_of, samecurve, started, steps_written, until
from samecurve.errors import START_AGAIN, RunError
from samecurve.launch.restarts import RestartBudget
from samecurve.observe import read_events
from samecurve.run.directory import Run
from samecurve.units import show_seconds
from samecurve.watch import announce

FLOOR = 3
CONFIG = """\
task: {task}:Task
model: {{}}
data: {{how: {how}, once: {once}, prefetch: {prefetch}}}
batch: {{samples: 8}}
train: {{steps: {steps}, save_every: 5, log_every: 20, precision: f64}}
devices: {{use: "cpu:{world}", hang_floor: {floor}, max_restarts: {restarts}}}
track: {{sensors_every: 0}}
"""


def run(
    home: Path, how: str = "none", *arguments: str, env: dict[str, str] | None = None, **fields: Any
) -> subprocess.CompletedProcess[str]:
    """A whole command. fields: of the config. The ranks it started are gone afterwards."""
    write(home, how, **fields)
    done = subprocess.run(
        command("train", "-f", "waiting.yaml", "--save-dir", "run", *arguments),
        cwd=home,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **(env or {})},
    )
    assert not ranks_of(home / "run")
    return done


def write(home: Path, how: str, once: str = "once", **fields: Any) -> None:
    values = {"prefetch": 2, "steps": 40, "world": 2, "restarts": 1, **fields}
    (home / "waiting.yaml").write_text(
        CONFIG.format(
            task=Path(__file__).with_name("waiting.py"),
            how=how,
            once=home / once,
            floor=FLOOR,
            **values,
        )
    )


def events(home: Path, kind: str) -> list[dict[str, Any]]:
    return [event.values for event in read_events(home / "run/journal.jsonl") if event.kind == kind]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    home = tmp_path_factory.mktemp("unbroken")
    done = run(home, world=1, restarts=0)
    assert done.returncode == 0, done.stderr
    return losses(home / "run")


@pytest.mark.long
def test_a_rank_asleep_in_its_feed_is_named_and_the_run_goes_on(
    tmp_path: Path, unbroken: list[float]
) -> None:
    """Its line is the user's own; the curve is the one of a run that nothing happened to."""
    done = run(tmp_path, "sleep")
    assert done.returncode == 0, done.stdout + done.stderr
    where = (
        r"rank 0 in \w+ \(step, since step \d+\); rank 1 in the feed: waiting\.py:\d+"
        r" __getitem__\(\) \(data, since step \d+\)"
    )
    assert (
        len(
            re.findall(
                rf"again  rank 1 gave no sign for \d+ s \(limit \d+ s\): {where}; start 2, from"
                r" step \d+",
                done.stdout,
            )
        )
        == 1
    )
    np.testing.assert_allclose(losses(tmp_path / "run"), unbroken, rtol=1e-12)
    (recovered,), (finished,) = events(tmp_path, "recovered"), events(tmp_path, "finished")
    assert finished["recoveries"] == [recovered["seconds"]]
    assert finished["steps"] == 40
    assert 0 < finished["goodput"] < 0.5  # of the whole command, the hang and both starts included
    assert f"over 2 starts, again in {show_seconds(recovered['seconds'])}" in done.stdout
    report = next((tmp_path / "run/logs").glob("hang-*.txt")).read_text()
    assert "rank 0: its threads" in report
    assert "all_reduce" in report


def test_a_stopped_rank_is_named_and_the_command_ends(tmp_path: Path) -> None:
    """Without restarts: exit 75, the cause once, the next command goes on."""
    write(tmp_path, "SIGSTOP", restarts=0)
    words = ("train", "-f", "waiting.yaml", "--save-dir", "run")
    done = samecurve(*words, cwd=tmp_path, code=START_AGAIN)
    assert not ranks_of(tmp_path / "run")
    said = done.stdout + done.stderr
    assert said.count("rank 1 stopped (SIGSTOP") == 1
    assert done.stderr.startswith("error: rank 1 stopped (SIGSTOP, or a terminal's Ctrl-Z)")
    assert len(said.splitlines()) <= 25
    (failed,) = events(tmp_path, "failed")
    assert failed["cause"].startswith("rank 1 stopped")


@pytest.mark.long
def test_a_lone_process_that_hangs_ends_itself(tmp_path: Path) -> None:
    done = run(tmp_path, "sleep", "--devices", "cpu", restarts=0, prefetch=0, env={"RANK": "1"})
    assert done.returncode == START_AGAIN
    assert re.match(
        r"error: rank 0 gave no sign for \d+ s \(limit \d+ s\): rank 0 in the feed: waiting\.py:\d+"
        r" __getitem__\(\)",
        done.stderr,
    ), done.stderr


@pytest.mark.long
def test_a_rank_that_is_killed_in_every_start_is_given_up(tmp_path: Path) -> None:
    """The starts asked for are used up, then the cause is said, once; what was saved stays."""
    done = run(tmp_path, "SIGTERM", once="no/such", steps=100)
    assert done.returncode == START_AGAIN
    assert done.stdout.count("again  rank 1 was ended by SIGTERM") == 1
    assert done.stderr.startswith("error: rank 1 was ended by SIGTERM\n")
    assert done.stderr.count("rank 1 was ended by") == 1
    assert "not started again: that was done once (--max-restarts)" in done.stderr
    first, second = (event["from"] for event in [{"from": 0}, *events(tmp_path, "recovered")])
    assert first < second < steps_written(tmp_path / "run")


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "says", "again"),
    [
        (
            "raise",
            (
                r"rank 1: \S*waiting\.py:\d+: the data of Task\.train_data\(\): ValueError: a"
                r" planted fault"
            ),
            False,
        ),
        (
            "EIO",
            (
                r"rank 1: \S*waiting\.py:\d+: the data of Task\.train_data\(\): OSError: \[Errno"
                r" 5\] Input/output error"
            ),
            True,
        ),
        ("leave", "rank 1 left with exit code 0 before the others were done", False),
    ],
)
def test_a_rank_that_fails_ends_the_run(
    *, how: str, says: str, again: bool, tmp_path: Path
) -> None:
    """Its number, the user's line and the cause first, once.

    A fault of the user's own is not tried again, one of a disk is.
    """
    done = run(tmp_path, how, restarts=1 if again else 3)
    said = done.stdout + done.stderr
    assert len(re.findall(says, said)) == 1
    assert done.returncode == (0 if again else 1), said
    if again:
        assert re.search(f"^again  {says}; start 2, from step ", done.stdout, re.MULTILINE)
    else:
        assert re.match(f"error: {says}\n", done.stderr)
        assert done.stderr.count("not started again: the same would happen") == 1
        assert len(done.stderr.splitlines()) <= 10
        assert events(tmp_path, "failed")


def test_restarts_are_for_what_another_start_may_end() -> None:
    killed, full = RunError("killed", again=True), RunError("no space left")
    assert RestartBudget(0).spend(killed, "step-5") == ""
    assert RestartBudget(3).spend(full, "step-5") == "not started again: the same would happen"
    fruitless = RestartBudget(100)
    assert [fruitless.spend(killed, "step-5") for _ in range(3)] == [None] * 3
    assert (
        fruitless.spend(killed, "step-5")
        == "not started again: 3 starts in a row failed before another save"
    )
    progress = RestartBudget(10)
    assert [progress.spend(killed, f"step-{step}") for step in range(10)] == [None] * 10
    assert (
        progress.spend(killed, "step-10")
        == "not started again: that was done 10 times (--max-restarts)"
    )


@pytest.mark.long
def test_a_stopped_rank_costs_no_more_than_the_floor_and_a_restart(tmp_path: Path) -> None:
    """At most 5 s beyond the floor and what torch elastic's own restart takes here, measured beside
    it.
    """
    bare = _bare_restart(tmp_path)
    done = run(tmp_path, "SIGSTOP")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run/journal.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    void = next(index for index, line in enumerate(lines) if line["kind"] == "restarted")
    last = max(line["time"] for line in lines[:void] if line["kind"] == "step")
    first = min(line["time"] for line in steps if line["time"] > lines[void]["time"])
    print(
        f"stopped to trained again {first - last:.1f} s; floor {FLOOR} s, bare elastic restart"
        f" {bare:.1f} s"
    )
    assert first - last < FLOOR + bare + 5


BARE = """
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
with open(sys.argv[1], "a") as file:
    print(time.time(), file=file)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
    os._exit(1)
dist.barrier()
"""


def _bare_restart(home: Path) -> float:
    """Seconds from one rank's death to both having met again, by torch elastic alone."""
    (home / "bare.py").write_text(BARE)
    subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            "--max-restarts=1",
            "--monitor-interval=0.1",
            "bare.py",
            "times",
        ],
        cwd=home,
        check=True,
        capture_output=True,
        timeout=120,
        env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    )
    times = sorted(map(float, (home / "times").read_text().split()))
    return times[-1] - times[0]


@pytest.mark.long
def test_a_signal_while_ranks_start_again_stops_the_run(tmp_path: Path) -> None:
    """Asked between two starts, the next one is told."""
    write(tmp_path, "SIGKILL", steps=100_000)
    with started("train", "-f", "waiting.yaml", "--save-dir", "run", cwd=tmp_path) as live:
        until(
            lambda: (
                (tmp_path / "run/journal.jsonl").exists()
                and '"restarted"' in (tmp_path / "run/journal.jsonl").read_text()
            )
        )
        live.send_signal(signal.SIGTERM)
        said = live.communicate(timeout=60)[0]
    assert live.returncode == 143, said
    assert events(tmp_path, "stopped")
    assert steps_written(tmp_path / "run") < 90_000
    time.sleep(0.1)
    assert not ranks_of(tmp_path / "run")


def test_a_number_that_another_process_has_now_is_no_rank(tmp_path: Path) -> None:
    """Ranks are killed by their number."""
    run = Run(tmp_path)
    run.logs.mkdir()
    announce(run.logs, 0)
    assert run.processes() == {0: os.getpid()}
    written = run.logs / "process-0.json"
    said = json.loads(written.read_text())
    written.write_text(json.dumps({**said, "since": said["since"] - 60}))
    assert run.processes() == {}
