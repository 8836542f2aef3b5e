"""What goes on beside a run: its sensors and the word about an idle device, its trackers, and that
none of them can harm it.
"""

import os
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from commands import losses, refused, samecurve, started, until, write_config
from samecurve.core.events import Event
from samecurve.core.system.installation import install_command
from samecurve.launch.monitors import watched
from samecurve.observe import read_events
from samecurve.run.directory import Run

SLEEPER = """
import os
import time
import numpy as np
from torch import nn
from samecurve import Mean

class Rows:
    def __len__(self):
        return 1000

    def __getitem__(self, ids):
        return {"x": np.ones((len(ids), 4), np.float32)}

class Sleeper:
    def __init__(self, model, data):
        pass

    def model(self):
        return nn.Linear(4, 1)

    def loss(self, model, batch):
        until = time.perf_counter() + 0.3
        if os.environ["RANK"] == "1":
            time.sleep(0.3)
        while time.perf_counter() < until:
            pass
        return Mean(model(batch["x"]).sum(), len(batch["x"]))

    def train_data(self):
        return Rows()
"""


@pytest.mark.long
def test_an_idle_rank_is_named_and_a_killed_tracker_stops_nothing(tmp_path: Path) -> None:
    """Two CPU ranks, one of which sleeps while the other works; read by the launcher itself, and
    here with less patience than its minute.
    """
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    (tmp_path / "sleeper.yaml").write_text(
        "task: sleeper.py:Sleeper\nbatch: {samples: 2}\ntrain: {steps: 100000}\ntrack:"
        " {sensors_every: 1}\n"
    )
    with started(
        "train",
        "-f",
        "sleeper.yaml",
        "--save-dir",
        "run",
        "--devices",
        "cpu:2",
        "--tensorboard",
        cwd=tmp_path,
    ) as live:
        run = Run(tmp_path / "run")
        until(lambda: _used(run))
        with watched(run, run.read_plan(), every=0.5, patience=2.0):
            said = until(lambda: _warned(run))
        tracker = next(
            child
            for child in psutil.Process(live.pid).children()
            if "samecurve.observe.trackers" in child.cmdline()
        )
        tracker.kill()
        until(lambda: len(_warned(run)) == 2)
        live.send_signal(signal.SIGINT)
        output, _ = live.communicate(timeout=60)
    assert live.returncode == 130
    assert said == [
        "device 1 (cpu, rank 1) did nothing for 2 s while others worked: a rank may be stuck"
        " (logs/rank-1.log) or wait for data (--prefetch); a larger --global-batch gives each"
        " device more to do"
    ]
    assert f"warn   {said[0]}" in output
    assert (
        "warn   TensorBoard: its process left with SIGKILL; run/logs/tensorboard.log may say more;"
        " training goes on without it" in output
    )
    worked, slept = _used(run)[-1]
    assert slept < 0.05 < worked
    assert _events(run)[-1].kind == "stopped"


@pytest.mark.long
def test_tensorboard_through_a_resume_and_a_start_in_which_it_fails(
    tmp_path: Path, corpus: Path
) -> None:
    """On the command line: stopped, gone on with while TensorBoard's directory can't be made, and
    again; its reader has each loss of the journal once.
    """
    train = (
        "train",
        "-f",
        write_config(tmp_path, corpus),
        "--save-dir",
        "run",
        "--devices",
        "cpu",
        "--tensorboard",
    )
    samecurve(*train, "--stop-after", 25, cwd=tmp_path)
    run, home = Run(tmp_path / "run"), tmp_path / "run/logs/tensorboard"
    assert len(_shown(home)) == 25
    shutil.move(home, tmp_path / "aside")
    home.write_text("in the way")
    samecurve(*train, "--stop-after", 10, cwd=tmp_path)
    assert _warned(run) == [
        f"TensorBoard: [Errno 17] File exists: '{Path('run/logs/tensorboard')}'; training goes on"
        " without it, and the same command sends later what is missing"
    ]
    home.unlink()
    shutil.move(tmp_path / "aside", home)
    samecurve(*train, cwd=tmp_path)
    assert _shown(home) == dict(enumerate(map(np.float32, losses(tmp_path / "run")), 1))
    assert len(_shown(home)) == 60
    shutil.rmtree(home)
    samecurve(*train, cwd=tmp_path)
    assert len(_shown(home)) == 60


def _shown(home: Path) -> dict[int, np.float32]:
    points = (
        EventAccumulator(str(home), size_guidance={"scalars": 0}).Reload().Scalars("train/loss")
    )
    assert len(points) == len({point.step for point in points})
    return {point.step: np.float32(point.value) for point in points}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            ["--tensorboard"],
            (
                "track.tensorboard needs tensorboard: not installed\n  remedy: "
                + install_command("tensorboard")
            ),
        ),
        (
            ["--wandb", "offline"],
            "track.wandb needs wandb: not installed\n  remedy: " + install_command("wandb"),
        ),
        (
            ["--mlflow"],
            "track.mlflow needs mlflow: not installed\n  remedy: " + install_command("mlflow"),
        ),
        (
            ["--trackio"],
            "track.trackio needs trackio: not installed\n  remedy: " + install_command("trackio"),
        ),
        (["--wandb", "ofline"], "did you mean offline?"),
        (["--set", "track.wandb_project=a/b"], "'a/b' is no name for a project"),
        (["--set", "track.sensors_every=-1"], "greater than or equal to 0"),
    ],
)
def test_refused_before_the_run(
    *,
    flags: list[str],
    says: str,
    tmp_path: Path,
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("tensorboard", "wandb", "mlflow", "trackio"):
        monkeypatch.setitem(sys.modules, name, None)
    assert says in refused(
        monkeypatch,
        capsys,
        "train",
        "-f",
        write_config(tmp_path, corpus),
        "--devices",
        "cpu",
        *flags,
        cwd=tmp_path,
    )
    assert sorted(os.listdir(tmp_path)) == ["tiny.yaml"]


def _used(run: Run) -> list[list[float]]:
    return [
        event.values["utilisation_by_device"]
        for event in _events(run)
        if event.kind == "sensors" and "utilisation_by_device" in event.values
    ]


def _warned(run: Run) -> list[str]:
    return [event.values["text"] for event in _events(run) if event.kind == "warned"]


def _events(run: Run) -> list[Event]:
    return read_events(run.journal) if run.journal.exists() else []
