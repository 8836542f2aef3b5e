"""train.sentinel on models as people write them: none of what a forward pass does beside a loss
reaches the run, and no sound model raises an alarm.
"""

from pathlib import Path
from typing import Any

import pytest

from rank_runs import train_on_ranks
from samecurve.checkpoint.format import load
from samecurve.core.planning.planner import plan
from samecurve.tasks import open_task
from tiny import MACHINE, config_of
from worlds import JobFailedError, Pool

HERE = Path(__file__).parent
LONG = pytest.mark.long


def trained(pool: Pool, home: Path, task: str, layout: str, **train: Any) -> dict[str, Any]:
    """Losses, norms and the last arrays. task: FILE:CLASS, or FILE:CLASS:KIND"""
    strategy, _, devices = layout.partition(":")
    place, _, kind = task.partition("|")
    config = config_of(
        {
            "task": f"{HERE}/{place}",
            "model": {"kind": kind} if kind else {},
            "batch": {"samples": 10, "per_device": 2},
            "optimizer": {"lr": 1e-2},
            "train": {"steps": 6, "precision": "f32", **train},
            "devices": {"use": f"cpu:{devices}", "strategy": strategy, "preflight": 0},
        }
    )
    made = plan(config, MACHINE, open_task(config, "").facts())
    events = train_on_ranks(pool, home, config, made)
    checked = [event for event in events if "gradients_alike" in event.values]
    assert len(checked) == (6 if train["sentinel"] else 0)
    steps = [event.values for event in events if event.kind == "step"]
    arrays = load(home / "checkpoints" / "step-00000006").arrays
    return {
        "loss": [step["loss"] for step in steps],
        "grad_norm": [step["grad_norm"] for step in steps],
        **{name: array.tobytes() for name, array in arrays.items()},
    }


@pytest.mark.parametrize(
    ("task", "layout"),
    [
        ("models.py:Task|layer drop", "single:1"),  # draws, and writes to its input
        ("models.py:Task|spectral", "ddp:2"),  # a buffer that moves once a step
        *(
            pytest.param(*case, marks=LONG)
            for case in (
                ("loops.py:Adversarial", "ddp:2"),  # two updates in a step
                ("models.py:Task|layer drop", "fsdp:2"),
                ("models.py:Task|spectral", "dp:2"),
                ("models.py:Task|spectral", "fsdp:2"),
                ("models.py:Task|sampling", "ddp:3"),
                ("models.py:Task|fourier", "fsdp:2"),
                ("models.py:Task|mixture", "fsdp:3"),
                ("models.py:Task|late", "ddp:2"),
                ("models.py:Phased|late", "fsdp:2"),
                ("loops.py:Momentum", "dp:2"),
            )
        ),
    ],
)
def test_a_run_is_the_same_to_the_bit(task: str, layout: str, pool: Pool, tmp_path: Path) -> None:
    plain = trained(pool, tmp_path / "plain", task, layout, sentinel=0)
    checked = trained(pool, tmp_path / "checked", task, layout, sentinel=1)
    assert checked.keys() == plain.keys()
    assert [name for name in plain if checked[name] != plain[name]] == []


@pytest.mark.long
def test_norms_that_follow_the_device_raise_no_alarm(pool: Pool, tmp_path: Path) -> None:
    """Their running statistics differ between ranks; a microbatch's gradient does not use them."""
    task = "models.py:Task|frozen"
    plain = trained(pool, tmp_path / "a", task, "ddp:2", sentinel=0, allow_coupled=True)
    checked = trained(pool, tmp_path / "b", task, "ddp:2", sentinel=1, allow_coupled=True)
    assert [name for name in plain if checked[name] != plain[name]] == []


def test_gradients_that_exist_in_a_step_only_are_refused(tmp_path: Path) -> None:
    own = Pool(2)  # a failed job costs a pool
    try:
        with pytest.raises(JobFailedError, match=r"train.sentinel: .* with use_reentrant=True"):
            trained(own, tmp_path, "models.py:Task|reentrant", "ddp:2", sentinel=1)
    finally:
        own.close()
