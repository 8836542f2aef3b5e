"""A run's end: its best checkpoint measured on test data, and results.json."""

import json
from pathlib import Path
from typing import Any

import pytest

from samecurve.core.events import Event
from samecurve.observe import read_events
from samecurve.observe.event_lines import console_lines
from samecurve.run.directory import Run
from samecurve.run.directory.results_file import write_results
from tiny import Outcome, TinyRun, config_of, tiny_values, train_tiny, with_test_data
from worlds import Pool


def run(pool: Pool, home: Path, corpus: Path, cache: Path, layout: str) -> tuple[Outcome, Event]:
    """Twelve steps, of which the first evaluation is called the best, and its line of the test."""
    engine, strategy, world = layout.split()
    train = {
        "steps": 12,
        "eval_every": 3,
        "save_every": 3,
        "keep": 1,
        "best_metric": "loss",
        "best_mode": "max",
        "ema": 0.5,
    }
    devices = {"use": f"cpu:{world}", "strategy": strategy}
    values = {**tiny_values(corpus, train=train, devices=devices), "engine": engine}
    processes = 1 if strategy == "dp" or engine == "jax" else int(world)
    outcome: Outcome = pool.run(
        processes, train_tiny, TinyRun(home, values, cache, kind=with_test_data)
    )[0]
    (line,) = [event for event in read_events(home / "journal.jsonl") if event.kind == "tested"]
    return outcome, line


@pytest.mark.parametrize(
    "layout",
    [
        "torch ddp 3",
        *(pytest.param(each, marks=pytest.mark.long) for each in ("torch fsdp 2", "jax dp 2")),
    ],
)
def test_the_best_checkpoint_is_tested_on_any_devices(
    layout: str, pool: Pool, corpus: Path, cache: Path, tmp_path: Path
) -> None:
    """The data are those of the evaluations, so that the best of these must come out again."""
    outcome, line = run(pool, tmp_path / "run", corpus, cache, layout)
    losses = [evaluated["loss"] for evaluated in outcome.evaluated]
    assert max(losses) == losses[0]
    assert line.step == 3
    assert line.values["loss"] == pytest.approx(losses[0], rel=1e-14)
    assert console_lines(line, outcome.plan, tmp_path)[0].startswith("test   step 3  loss ")
    end = read_events(tmp_path / "run" / "journal.jsonl")[-1]
    assert (end.kind, end.step) == ("finished", 12)
    assert end.values["loss"] == losses[-1]


def test_results_say_what_the_journal_says(
    pool: Pool, corpus: Path, cache: Path, tmp_path: Path
) -> None:
    outcome, line = run(pool, tmp_path / "run", corpus, cache, "torch single 1")
    config = config_of(tiny_values(corpus))
    write_results(Run(tmp_path / "run"), outcome.plan, config)
    results: dict[str, Any] = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["batch"]["samples"] == 10
    assert results["training"]["steps"] == 12
    assert results["training"]["epochs"] == 4  # of 23 samples each
    assert results["training"]["loss"] == outcome.losses[-1]
    assert results["best"]["step"] == 3
    assert results["best"]["value"] == results["test"]["loss"] == line.values["loss"]
    assert results["evaluation"]["step"] == 12
    assert results["config"]["model.hidden_size"] == 32


def test_results_of_a_journal_that_somebody_edited(
    pool: Pool, corpus: Path, cache: Path, tmp_path: Path
) -> None:
    """Lines without seconds or a loss are left out of what is counted from them."""
    outcome, _ = run(pool, tmp_path / "run", corpus, cache, "torch single 1")
    journal = tmp_path / "run" / "journal.jsonl"
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    del steps[3]["seconds"], steps[-1]["loss"]
    steps[4]["seconds"] = "long"
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_results(Run(tmp_path / "run"), outcome.plan, config_of(tiny_values(corpus)))
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    counted = [step["seconds"] for step in (*steps[1:3], *steps[5:])]
    assert results["training"]["step_seconds"] == pytest.approx(sum(counted))
    assert results["training"]["loss"] is None
