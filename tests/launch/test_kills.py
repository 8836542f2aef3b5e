"""kill -9 at any instant: no orphan, no unreadable checkpoint, at most one save interval redone
(and what was trained while a checkpoint was written), and the same run in the end.
"""

import json
import os
import random
import signal
import subprocess
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from commands import losses, ranks_of, samecurve, started, steps_written, until, write_config
from samecurve.checkpoint.format import load, verify_checkpoint
from samecurve.checkpoint.store import checkpoints
from samecurve.observe import read_beat

STEPS, SAVE = 60, 10


@pytest.mark.parametrize(
    "kills", [2, pytest.param(20, marks=[pytest.mark.long, pytest.mark.timeout(3000)])]
)
def test_killed_and_gone_on_with(
    kills: int, unbroken_run: Path, tmp_path: Path, corpus: Path
) -> None:
    """Phases and ranks swept: the launcher or one of its ranks dies in a step, while saving,
    evaluating, or just starting; the next attempt has another world, and every second one another
    strategy.
    """
    home, run = tmp_path, tmp_path / "run"
    chance = random.Random(kills)
    for kill in range(kills):
        if kill % 6 == 0:
            _fresh(home, corpus, kill)
        world = 1 + kill % 3
        saved_before = _last_saved(run)
        with started(
            "train",
            "-f",
            home / "tiny.yaml",
            "--save-dir",
            "run",
            "--devices",
            f"cpu:{world}",
            "--strategy",
            ("auto", "fsdp", "dp")[kill // 2 % 3],
            cwd=home,
        ) as live:
            phase = ("step", "save", "evaluate", "start")[kill % 4]
            until(partial(_reached_or_ended, run, phase, saved_before, live))
            assert live.poll() is None, live.communicate()[0]
            victims = ranks_of(run)
            victim = chance.choice(victims) if victims and kill % 2 else live.pid
            os.kill(victim, signal.SIGKILL)
            live.communicate(timeout=60)
        until(lambda: not ranks_of(run), timeout=10)
        for path in checkpoints(run / "checkpoints"):
            verify_checkpoint(path)
        assert _last_saved(run) >= saved_before
        # beside the training a save is written, whose interval is redone too if it is cut short
        assert steps_written(run) - _last_begun(run) <= SAVE
        assert _last_begun(run) - _last_saved(run) <= SAVE
    done = samecurve(
        "train", "-f", home / "tiny.yaml", "--save-dir", "run", "--devices", "cpu:2", cwd=home
    )
    assert f"resume step {_resumed_at(run)}" in done.stdout
    np.testing.assert_allclose(losses(run), losses(unbroken_run), rtol=1e-12)
    one, two = (
        load(run / f"checkpoints/step-{STEPS:08d}").arrays,
        load(unbroken_run / f"checkpoints/step-{STEPS:08d}").arrays,
    )
    for name in two:
        np.testing.assert_allclose(one[name], two[name], rtol=0, atol=1e-12, err_msg=name)


def _fresh(home: Path, corpus: Path, kill: int) -> None:
    """A run long enough for six kills; the one before is set aside."""
    if (home / "run").exists():
        (home / "run").rename(home / f"run-before-{kill}")
    write_config(home, corpus, STEPS, SAVE)


def _reached_or_ended(
    run: Path, phase: str, saved_before: int, live: subprocess.Popen[str]
) -> bool:
    return _reached(run, phase, saved_before) or live.poll() is not None


def _reached(run: Path, phase: str, saved_before: int) -> bool:
    """This attempt is in the phase, a few steps beyond what was saved before (so that each kill
    makes some progress).
    """
    beat = read_beat(run / "logs/heartbeat-0")
    if phase == "start":
        return bool(ranks_of(run)) or (beat is not None and beat.step > saved_before)
    if beat is None:
        return False
    in_phase = beat.activity == phase and beat.step > saved_before + 2
    # a short phase may be missed, the kill may not
    return in_phase or beat.step > saved_before + 2 * SAVE + 5


def _last_saved(run: Path) -> int:
    return max(
        (int(path.name.removeprefix("step-")) for path in checkpoints(run / "checkpoints")),
        default=0,
    )


def _last_begun(run: Path) -> int:
    """The step of the newest checkpoint, or of what a save that was cut short has left."""
    left = (run / "checkpoints").glob(".step-*")  # .step-00000020.1: the attempt's number follows
    steps = [int(path.name.split(".")[1].removeprefix("step-")) for path in left]
    return max([_last_saved(run), *steps])


def _resumed_at(run: Path) -> int:
    lines = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    return int([line for line in lines if line["kind"] == "resumed"][-1]["step"])
