"""Whole runs from the command line: every launcher gives the same curve; stopping and going on
changes nothing.
"""

import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest

from commands import (
    assert_same_run,
    command,
    ranks_of,
    samecurve,
    started,
    steps_written,
    until,
    write_config,
)
from samecurve.errors import START_AGAIN
from samecurve.observe import read_events


@pytest.mark.long
def test_an_older_name_of_the_launcher_gives_the_same_run(
    unbroken_run: Path, tmp_path: Path, corpus: Path
) -> None:
    done = samecurve(
        "train",
        "-f",
        write_config(tmp_path, corpus),
        "--save-dir",
        "run",
        "--devices",
        "cpu:2",
        "--launcher",
        "elastic",
        "--headless",
        cwd=tmp_path,
    )
    kinds = [json.loads(line)["kind"] for line in done.stdout.splitlines()]
    assert kinds.count("step") == 60
    assert (kinds[0], kinds[-1]) == ("planned", "finished")
    assert_same_run(tmp_path / "run", unbroken_run)
    assert not ranks_of(tmp_path / "run")


@pytest.mark.long
def test_a_killed_launcher_leaves_nothing_in_tmpdir(tmp_path: Path, corpus: Path) -> None:
    temporary, run = tmp_path / "temporary", tmp_path / "run"
    temporary.mkdir()
    config = write_config(tmp_path, corpus, steps=10**6)
    line = command("train", "-f", config, "--save-dir", run, "--devices", "cpu:2")
    with subprocess.Popen(
        line,
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.DEVNULL,
    ) as launcher:
        until(lambda: steps_written(run) > 3)
        launcher.kill()
    until(lambda: not ranks_of(run))
    assert [path.name for path in temporary.iterdir() if "torchinductor" not in path.name] == []


def torchrun(home: Path, corpus: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Two ranks of a run in home/run."""
    config = str(write_config(home, corpus))
    line = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    line += ["-m", "samecurve", "train", "-f", config, "--save-dir", "run", *more]
    return subprocess.run(line, cwd=home, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.long
def test_torchrun_starts_the_ranks(unbroken_run: Path, tmp_path: Path, corpus: Path) -> None:
    done = torchrun(tmp_path, corpus)
    assert done.returncode == 0, done.stderr
    assert "done   step 60  60 steps" in done.stdout
    assert_same_run(tmp_path / "run", unbroken_run)


@pytest.mark.long
def test_torchruns_ranks_tell_a_slip_once(tmp_path: Path, corpus: Path) -> None:
    slip = torchrun(tmp_path, corpus, "--set", "train.stes=3")
    assert slip.returncode == 1
    assert slip.stderr.count("did you mean steps?") == 1


def test_ctrl_c_saves_and_the_same_command_goes_on_elsewhere(tmp_path: Path, corpus: Path) -> None:
    """On a terminal, without --save-dir: stopped on two ranks, gone on with by three.

    A live bar shows progress, on a narrow terminal too, whose lines end with whole words.
    """
    config = write_config(tmp_path, corpus, steps=200, save=100)
    arguments = command("train", "-f", config, "--devices", "cpu:2")
    terminal = pexpect.spawn(
        arguments[0],
        arguments[1:],
        cwd=str(tmp_path),
        timeout=90,
        dimensions=(30, 40),
        encoding="utf-8",
    )
    terminal.logfile_read = screen = io.StringIO()
    terminal.expect("step   [0-9]+/200  loss [0-9.]+ .*\N{BOX DRAWINGS HEAVY HORIZONTAL}")
    terminal.sendintr()
    terminal.expect("stopping at the end of this step")
    terminal.expect(pexpect.EOF)
    lines = re.split(r"[\r\n]+|\x1b\[[0-9;?]*[A-LN-Za-ln-z]", screen.getvalue())
    texts = [re.sub(r"\x1b\[[0-9;]*m|\^C", "", line).strip() for line in lines]
    assert not [text for text in texts if len(text) > 40 and " " in text]  # paths stay whole
    terminal.close()
    assert terminal.exitstatus == 130
    (run,) = (tmp_path / "runs").iterdir()
    assert [event.kind for event in read_events(run / "journal.jsonl")][-1] == "stopped"
    stopped = steps_written(run)
    assert stopped < 200
    done = samecurve("train", "-f", config, "--devices", "cpu:3", cwd=tmp_path)
    assert f"resume step {stopped}" in done.stdout
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [run.name]
    samecurve("train", "-f", config, "--save-dir", "unbroken", cwd=tmp_path)
    assert_same_run(run, tmp_path / "unbroken")


@pytest.mark.long
def test_a_killed_rank_ends_the_run_with_its_name(tmp_path: Path, corpus: Path) -> None:
    config = write_config(tmp_path, corpus, steps=100_000)
    with started(
        "train", "-f", config, "--save-dir", "run", "--devices", "cpu:3", cwd=tmp_path
    ) as live:
        until(lambda: steps_written(tmp_path / "run") > 25)
        victim = next(pid for pid in ranks_of(tmp_path / "run") if _rank_of(pid) == 1)
        os.kill(victim, signal.SIGKILL)
        output, _ = live.communicate(timeout=60)
    assert live.returncode == START_AGAIN
    error = output[output.index("error: ") :].splitlines()
    assert (
        error[0] == "error: rank 1 was ended by SIGKILL; memory had not run out: a person or a"
        " scheduler sent it"
    )
    assert [line.split(":")[0] for line in error[-2:]] == ["  remedy", "  log"]
    assert output.count("SIGKILL") == 1
    assert not ranks_of(tmp_path / "run")
    assert [event.kind for event in read_events(tmp_path / "run/journal.jsonl")][-1] == "failed"


def test_a_loss_that_is_not_finite_stops_with_its_samples(tmp_path: Path, corpus: Path) -> None:
    config = write_config(tmp_path, corpus)
    done = samecurve(
        "train",
        "-f",
        config,
        "--save-dir",
        "run",
        "--devices",
        "cpu:2",
        "--lr",
        "1e200",
        "--set",
        "optimizer.clip=0",
        "--set",
        "optimizer.name=sgd",
        cwd=tmp_path,
        code=1,
    )
    assert "not finite" in done.stderr
    assert done.stderr.count("error:") == 1
    warned = [
        event for event in read_events(tmp_path / "run/journal.jsonl") if event.kind == "warned"
    ]
    assert len(warned[-1].values["sample_ids"]) == 10


def _rank_of(pid: int) -> int:
    return int(Path(os.readlink(f"/proc/{pid}/fd/1")).stem.removeprefix("rank-"))
