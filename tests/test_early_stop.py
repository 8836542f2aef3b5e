"""A run ends early at the same step on any devices, with the same average of its weights."""

from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samecurve.checkpoint import read_manifest
from samecurve.checkpoint.format import Arrays, load
from samecurve.checkpoint.store import checkpoints
from samecurve.core.config import MetricGoal
from samecurve.core.evaluation import check_goals
from samecurve.core.planning.planner import plan
from samecurve.core.protocols import Counters
from samecurve.errors import InvalidConfigError, UserError
from samecurve.features.early_stop import EarlyStopRule
from samecurve.features.early_stop.loop_hooks import count_waiting
from samecurve.observe import read_events
from samecurve.observe.event_lines import console_lines
from samecurve.run.weights.opened_checkpoint import Weights
from tiny import (
    MACHINE,
    Outcome,
    TinyRun,
    config_of,
    counting,
    ragged_task,
    tiny_values,
    train_tiny,
)
from worlds import Pool

DECAY = 0.8
Train = Callable[..., Outcome]


def values(corpus: Path, **train: Any) -> dict[str, Any]:
    """A run whose evaluations get better by less than 0.42 in the end."""
    stop = {"patience": 2, "min_delta": 0.42}
    every = {"eval_every": 3, "early_stop": stop, "ema": DECAY}
    return tiny_values(corpus, train={"steps": 60, **every, **train}, batch={"samples": 7})


@pytest.fixture(scope="module")
def train(pool: Pool, corpus: Path, cache: Path) -> Train:
    def run(
        home: Path, layout: str, *, fault: str = "", resume: Path | None = None, **options: Any
    ) -> Outcome:
        engine, strategy, world = layout.split()
        config = values(corpus, **options.pop("train", {}))
        devices = options.pop("devices", {})
        config["devices"] = {"use": f"cpu:{world}", "strategy": strategy, **devices}
        processes = 1 if strategy == "dp" or engine == "jax" else int(world)
        tiny = TinyRun(home, {**config, "engine": engine}, cache, fault, resume, **options)
        outcome: Outcome = pool.run(processes, train_tiny, tiny)[0]
        return outcome

    return run


@pytest.fixture(scope="module")
def reference(train: Train, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """On one device, every step saved."""
    home = tmp_path_factory.mktemp("reference")
    return home, train(home, "torch single 1", train={"save_every": 1, "keep": 0})


def averages(outcome: Outcome) -> dict[str, Any]:
    return {name: array for name, array in outcome.arrays.items() if name.startswith("ema/")}


def test_it_ends_when_nothing_gets_better_and_says_so(reference: tuple[Path, Outcome]) -> None:
    home, outcome = reference
    done = len(outcome.losses)
    losses = [evaluated["loss"] for evaluated in outcome.evaluated]
    assert done == 3 * len(losses) < 60
    best, waited = losses[0], 0
    for loss in losses[1:]:
        assert waited < 2
        best, waited = (loss, 0) if best - loss > 0.42 else (best, waited + 1)
    assert waited == 2
    events = read_events(home / "journal.jsonl")
    assert events[-1].kind == "finished"
    assert events[-1].values["early_stop"] == {
        "metric": "loss",
        "best": best,
        "best_step": done - 6,
        "evaluations": 2,
    }
    line = console_lines(events[-1], outcome.plan, home)[0]
    assert f"stopped early at step {done}: no better loss since step {done - 6}" in line


def test_the_average_is_what_is_evaluated_and_used(reference: tuple[Path, Outcome]) -> None:
    """From the weights saved at each step; the first are those of step 1 taken back one update."""
    home, outcome = reference
    saved = [load(path).arrays for path in reversed(checkpoints(home / "checkpoints"))]
    for before, after in pairwise(saved):
        for name in averages(outcome):
            weight = after[f"model/{name.removeprefix('ema/')}"]
            expected = DECAY * before[name] + (1 - DECAY) * weight
            np.testing.assert_allclose(after[name], expected, rtol=0, atol=1e-15)
    newest = checkpoints(home / "checkpoints")[0]
    weights = Weights(Arrays(newest, read_manifest(newest)))
    name = "layers.0.mlp.up_proj.weight"
    assert (weights[name] == outcome.arrays[f"ema/{name}"]).all()
    assert not np.allclose(weights[name], outcome.arrays[f"model/{name}"], atol=1e-4)


LAYOUTS = ["torch ddp 3", "torch dp 2"]


@pytest.mark.parametrize(
    "layout",
    [*LAYOUTS, *(pytest.param(x, marks=pytest.mark.long) for x in ["jax fsdp 2", "jax dp 3"])],
)
def test_any_devices_end_at_the_same_step_with_the_same_average(
    layout: str, reference: tuple[Path, Outcome], train: Train, tmp_path: Path
) -> None:
    check_same(train(tmp_path, layout), reference[1])


def check_same(outcome: Outcome, expected: Outcome) -> None:
    assert len(outcome.losses) == len(expected.losses)
    np.testing.assert_allclose(outcome.losses, expected.losses, rtol=1e-12)
    for one, other in zip(outcome.evaluated, expected.evaluated, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-12)
    assert averages(outcome).keys() == averages(expected).keys()
    for name, array in averages(expected).items():
        np.testing.assert_allclose(outcome.arrays[name], array, rtol=0, atol=1e-12)


def test_gathered_weights_are_not_taken_for_the_average(
    reference: tuple[Path, Outcome], train: Train, tmp_path: Path
) -> None:
    """fsdp that keeps what it gathered would train on with the average."""
    check_same(train(tmp_path, "torch fsdp 2", devices={"reshard": False}), reference[1])


def test_a_run_that_moves_ends_where_the_unbroken_one_does(
    reference: tuple[Path, Outcome], train: Train, tmp_path: Path
) -> None:
    """Stopped while it waits for a better evaluation."""
    _, expected = reference
    stop = len(expected.losses) - 2
    train(tmp_path, "torch ddp 2", stop_at=stop)
    (checkpoint, *_) = checkpoints(tmp_path / "checkpoints")
    assert load(checkpoint).loop["early_waited"] == 1
    check_same(train(tmp_path, "jax dp 2", resume=checkpoint), expected)


def test_a_rank_that_judges_by_its_own_loss_is_seen(
    reference: tuple[Path, Outcome], train: Train, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError):
        check_same(train(tmp_path, "torch ddp 2", fault="own loss"), reference[1])


def test_the_best_checkpoint_is_that_of_the_metric_that_is_named(
    train: Train, tmp_path: Path
) -> None:
    """`diagonal` is the share of predicted classes: more of it is better here."""
    named = {"best_metric": "diagonal", "best_mode": "max", "keep": 1, "save_every": 3}
    outcome = train(tmp_path, "torch single 1", train={**named, "steps": 12}, kind=counting)
    diagonals = [evaluated["diagonal"] for evaluated in outcome.evaluated]
    best = max(diagonals)
    assert outcome.evaluated[-1]["best_value"] == best
    kept = {load(path).step for path in checkpoints(tmp_path / "checkpoints")}
    assert kept == {len(outcome.losses), 3 * (1 + diagonals.index(best))}


def test_waiting_begins_anew_with_each_better_one() -> None:
    rule = EarlyStopRule(MetricGoal("f1", "max"), patience=2, min_delta=0.1)
    counters = Counters()
    waited = []
    for step, value in enumerate([None, 0.5, 0.55, 0.61, 0.7, None, 0.65], 1):
        counters.metrics = {"loss": 1.0, "f1": value}
        count_waiting(counters, rule, step)
        waited.append(counters.early_waited)
    assert waited == [1, 0, 1, 0, 1, 2, 3]
    assert (counters.early_value, counters.early_step) == (0.61, 4)
    counters.metrics = {"loss": 1.0}
    with pytest.raises(UserError, match="'f1' is no number that an evaluation gives"):
        count_waiting(counters, rule, 8)


def test_an_older_checkpoints_counters_are_read() -> None:
    counters = Counters.from_loop({"best_loss": 0.25, "best_step": 3, "skipped": 1})
    assert (counters.best_value, counters.best_step, counters.skipped) == (0.25, 3, 1)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"early_stop": {"metric": "f1"}, "eval_every": 3}, "needs mode: max if more"),
        ({"best_metric": "f1"}, "best_metric f1 needs best_mode"),
        ({"early_stop": {}}, "one at the end only"),
        ({"ema": 1.0}, "less than 1"),
    ],
)
def test_what_says_nothing_is_refused(
    train: dict[str, Any], message: str, corpus: Path, cache: Path
) -> None:
    def planned() -> None:
        config = config_of(tiny_values(corpus, train=train))
        plan(config, MACHINE, ragged_task(config, cache).facts())

    with pytest.raises((InvalidConfigError, UserError), match=message):
        planned()


@pytest.mark.parametrize(
    ("metric", "says"),
    [("pairs", "'pairs' is no number"), ("f2", "'f2' is no number"), ("diagonal", "")],
)
def test_a_metric_that_no_evaluation_gives_is_told_before_the_first_step(
    metric: str, says: str, corpus: Path, cache: Path
) -> None:
    """Found without one; `pairs` is an array."""
    named = {"best_metric": metric, "best_mode": "max", "eval_every": 3}
    config = config_of(tiny_values(corpus, train=named))
    task = ragged_task(config, cache, kind=counting)
    made = plan(config, MACHINE, task.facts())
    expected = pytest.raises(UserError, match=says) if says else nullcontext()
    with expected:
        check_goals(made.goals, task.eval_sums, task.summarize)
