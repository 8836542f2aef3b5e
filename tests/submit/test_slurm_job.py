"""A job in a real Slurm: a rank that is killed, the time limit, and the curve at the end."""

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

import slurm_cluster
from commands import assert_same_run, command, samecurve, steps_written, until
from samecurve.observe import read_events

STEPS = 400
# a step takes long enough in the job that the time limit comes before the end
TASK = """
import os, time
import numpy as np
import torch
from samecurve import Mean

class Rows:
    def __len__(self):
        return 512
    def __getitem__(self, ids):
        time.sleep(float(os.environ.get("SLOW", "0")))
        return {"x": np.sin(np.outer(np.asarray(ids) + 1.0, np.arange(1, 9)))}

class Task:
    def __init__(self, model, data): ...
    def model(self):
        return torch.nn.Linear(8, 1)
    def train_data(self):
        return Rows()
    def loss(self, model, batch):
        return Mean((model(batch["x"]) ** 2 - batch["x"]).square().sum(), len(batch["x"]))
"""
CONFIG = f"""
task: mine.py:Task
batch: {{samples: 10}}
optimizer: {{lr: 3.0e-3}}
data: {{workers: 0}}
train: {{steps: {STEPS}, precision: f64, save_every: 10, log_every: 50}}
"""


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(bool(slurm_cluster.missing()), reason=slurm_cluster.missing())
def test_a_job_outlives_a_killed_rank_and_its_time_limit(tmp_path: Path) -> None:
    """Restarted inside the job, saved before the limit, queued again, with one curve.

    Slurm follows processes by their names here: a rank whose name it can't read would go on.
    """
    (tmp_path / "mine.py").write_text(TASK)
    (tmp_path / "job.yaml").write_text(CONFIG)
    samecurve("train", "-f", "job.yaml", "--devices", "cpu", "--save-dir", "never", cwd=tmp_path)
    run, home = tmp_path / "run", tmp_path / "slurm"
    home.mkdir()
    with slurm_cluster.slurm(home) as environment:
        limit = ("--time", "3", "--save-seconds", "60")
        job = _submit(tmp_path, {**environment, "SLOW": "0.3"}, *limit)
        until(lambda: steps_written(run) > 20, 150)
        [victim] = _ranks(run, "samecurve rank 1")
        os.kill(victim, signal.SIGKILL)
        log = run / "submit" / f"{job}.log"
        until(lambda: "starting again, 2 more are left" in log.read_text(), 60)
        until(lambda: "back into the queue" in log.read_text(), 200)
        until(lambda: steps_written(run) == STEPS and _state(job, environment) == "COMPLETED", 500)
        assert "Restarts=0" not in _output(["scontrol", "show", "job", job], environment)
        assert not _ranks(run, "samecurve rank")
    assert [event.kind for event in read_events(run / "journal.jsonl")][-1] == "finished"
    assert_same_run(run, tmp_path / "never")


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(slurm_cluster.missing()), reason=slurm_cluster.missing())
def test_the_queue_says_why_it_refuses_and_a_cancelled_job_stays_away(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TASK)
    (tmp_path / "job.yaml").write_text(CONFIG)
    run, home = tmp_path / "run", tmp_path / "slurm"
    home.mkdir()
    with slurm_cluster.slurm(home) as environment:
        refused = subprocess.run(
            _command("--partition", "nowhere"),
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert refused.returncode == 1
        assert "sbatch refused the job (exit code 1): sbatch: error: invalid" in refused.stderr
        job = _submit(tmp_path, {**environment, "SLOW": "0.3"})
        until(lambda: steps_written(run) > 2, 120)
        subprocess.run(["scancel", job], env=environment, check=True)
        until(lambda: _state(job, environment) == "CANCELLED", 60)
        until(lambda: not _ranks(run, "samecurve rank"), 60)
        assert "queue" not in (run / "submit" / f"{job}.log").read_text()


def _command(*options: str) -> list[str]:
    machines = ("--nodes", "2", "--gpus-per-node", "0", "--devices", "cpu:1")
    return command("submit", "slurm", "-f", "job.yaml", *machines, "--save-dir", "run", *options)


def _submit(home: Path, environment: dict[str, str], *options: str) -> str:
    """Returns the job's number."""
    shown = subprocess.run(
        _command(*options), cwd=home, env=environment, capture_output=True, text=True, check=True
    ).stdout
    return shown.partition("Submitted batch job ")[2].split()[0]


def _ranks(run: Path, name: str) -> list[int]:
    """The ranks that work on the run and whose name begins like this."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or [""]
        if words[0].startswith(name) and Path(process.cwd()) / "run" == run:
            found.append(process.pid)
    return found


def _state(job: str, environment: dict[str, str]) -> str:
    shown = _output(["scontrol", "show", "job", job], environment)
    return shown.partition("JobState=")[2].split()[0] if "JobState=" in shown else ""


def _output(words: list[str], environment: dict[str, str]) -> str:
    return subprocess.run(
        words, env=environment, capture_output=True, text=True, check=False
    ).stdout
