"""Runs of tasks with a loss over the whole batch, and their curves, for both engines' tests."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rank_runs import train_one_rank
from samecurve.checkpoint.format import load as load_checkpoint
from samecurve.core.config.document import Document
from samecurve.core.config.loading import load_document
from samecurve.core.config.sections import Config
from samecurve.core.planning.planner import plan
from samecurve.observe import read_events
from samecurve.run.directory import Run
from samecurve.run.directory.attempt import Attempt
from samecurve.tasks import Tasks, open_task
from tiny import MACHINE
from worlds import Pool

STEPS, BATCH = 6, 10  # two epochs of 23 samples, each with a tail of 3


class Curve(NamedTuple):
    losses: list[float]
    evaluated: list[float]
    weights: dict[str, Any]
    hashes: list[str]


class Alone:
    """A pool of this process."""

    def run(self, world: int, job: Any, *arguments: Any) -> list[Any]:
        assert world == 1
        return [job(0, None, *arguments)]


def batch_config(task: str, **sections: Any) -> Config:
    values = {
        "task": task,
        **sections,
        "batch": {"samples": BATCH, **sections.get("batch", {})},
        "optimizer": {"name": "sgd", "lr": 0.05, "clip": 0.0, "weight_decay": 0.0},
        "schedule": {"warmup": 0},
    }
    values["train"] = {
        "steps": STEPS,
        "precision": "f64",
        "eval_every": 3,
        "sample_every": 0,
        **sections.get("train", {}),
    }
    return load_document(Document(values), Tasks()).config


def with_layout(config: Config, strategy: str, world: int) -> Config:
    devices = config.devices.model_copy(update={"use": f"cpu:{world}", "strategy": strategy})
    return config.model_copy(update={"devices": devices})


def trained(pool: Pool | Alone, home: Path, config: Config, **resume: Any) -> Curve:
    """By as many ranks as the plan has."""
    made = plan(config, MACHINE, open_task(config, "").facts())
    run = Run(home)
    for directory in (run.home, run.checkpoints, run.logs):
        directory.mkdir(parents=True, exist_ok=True)
    run.write(config, made)
    attempt = Attempt("test", str(home), **resume)
    pool.run(made.world_size, train_one_rank, attempt.to_json())
    return curve_of(run)


def curve_of(run: Run) -> Curve:
    events = read_events(run.journal)
    last = sorted(run.checkpoints.glob("step-*"))[-1]
    arrays = load_checkpoint(last).arrays
    return Curve(
        [event.values["loss"] for event in events if event.kind == "step"],
        [event.values["loss"] for event in events if event.kind == "evaluated"],
        {name: array.copy() for name, array in arrays.items() if name.startswith("model/")},
        [event.values["hash"] for event in events if "hash" in event.values],
    )


def check_equal(curve: Curve, expected: Curve, tolerance: float = 1e-12) -> None:
    np.testing.assert_allclose(curve.losses, expected.losses, rtol=tolerance)
    np.testing.assert_allclose(curve.evaluated, expected.evaluated, rtol=tolerance)
    assert curve.weights.keys() == expected.weights.keys()
    for name, value in expected.weights.items():
        np.testing.assert_allclose(curve.weights[name], value, rtol=0, atol=tolerance, err_msg=name)
