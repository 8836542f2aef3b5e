"""Arrays of counts as metrics, and pictures as samples: the same on any devices, kept in files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from samecurve.checkpoint.format import load
from samecurve.core.evaluation import SumSpec, check_shape, journal_value, unpack_sums
from samecurve.core.events import Event
from samecurve.core.planning.plan import Plan
from samecurve.core.planning.planner import plan
from samecurve.errors import UserError
from samecurve.observe import line_of, read_events
from samecurve.observe.event_lines import console_lines
from samecurve.observe.pictures import check_picture, keep_pictures, pictures, png
from samecurve_products.report.evaluation_blocks import evaluations
from samecurve_products.report.reading import read_run
from samecurve_products.trackers.metrics import plotted
from tiny import MACHINE, config_of, ragged_task, tiny_values, train_counting
from worlds import Pool

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def evaluated(pool: Pool, corpus: Path, cache: Path, tmp_path: Path) -> Run:
    """The last evaluation of a run of two steps."""

    def run(engine: str, strategy: str, world: int, *, exact: bool = False) -> dict[str, Any]:
        values = tiny_values(
            corpus,
            train={
                "steps": 2,
                "eval_every": 2,
                "sample_every": 2,
                "precision": "f32",
                "exact": exact,
            },
            devices={"use": f"cpu:{world}", "strategy": strategy},
        )
        processes = 1 if strategy == "dp" or engine == "jax" else world
        home = tmp_path / f"{engine}-{strategy}-{world}-{exact}"
        outcomes = pool.run(processes, train_counting, home, {**values, "engine": engine}, cache)
        last: dict[str, Any] = outcomes[0].evaluated[-1]
        return last

    return run


@pytest.mark.parametrize("exact", [False, pytest.param(True, marks=pytest.mark.long)])
def test_counts_are_equal_on_any_devices_and_engine(evaluated: Run, *, exact: bool) -> None:
    """Not close: equal. Held-out samples do not divide evenly by three."""
    reference = evaluated("torch", "single", 1, exact=exact)
    assert np.shape(reference["pairs"]) == (4, 4)
    assert sum(map(sum, reference["pairs"])) > 200
    assert all(isinstance(count, int) for row in reference["pairs"] for count in row)
    layouts = [("torch", "ddp", 3), ("torch", "dp", 2)]
    layouts += [("jax", "dp", 1), ("jax", "dp", 3)] if exact else [("torch", "fsdp", 2)]
    layouts += [] if exact else [("jax", "dp", 2)]
    for engine, strategy, world in layouts:
        found = evaluated(engine, strategy, world, exact=exact)
        assert found["pairs"] == reference["pairs"], (engine, strategy, world)
        assert found["share"] == reference["share"]
        np.testing.assert_allclose(found["ids"], reference["ids"], rtol=1e-6)
        if exact and engine == "torch":
            assert found["ids"] == reference["ids"]


def test_a_run_keeps_its_pictures_and_its_readers_find_them(
    evaluated: Run, corpus: Path, cache: Path, tmp_path: Path
) -> None:
    evaluated("torch", "ddp", 2)
    home = tmp_path / "torch-ddp-2-False"
    events = read_events(home / "journal.jsonl")
    (sampled,) = [event for event in events if event.kind == "sampled"]
    assert sampled.values["texts"] == ["a text"]
    assert pictures(sampled) == ["samples/step-00000002-0.png", "samples/step-00000002-1.png"]
    assert sorted(path.name for path in (home / "samples").iterdir()) == [
        Path(name).name for name in pictures(sampled)
    ]
    grey = np.arange(15, dtype=np.uint8).reshape(3, 5)
    with Image.open(home / "samples/step-00000002-0.png") as colour:
        assert colour.mode == "RGB"
        assert (np.asarray(colour) == grey[:, ::-1, None]).all()
    with Image.open(home / "samples/step-00000002-1.png") as one:
        assert (np.asarray(one) == grey).all()
    assert png(home, pictures(sampled)[0]).startswith(b"\x89PNG")
    plan_made = made(corpus, cache)
    assert console_lines(sampled, plan_made, home) == [
        "sample",
        "  | a text",
        f"sample step 2  2 pictures  {home}/samples/step-00000002-0.png to step-00000002-1.png",
    ]
    (evaluation,) = [event for event in events if event.kind == "evaluated"]
    (line,) = console_lines(evaluation, plan_made, home)
    assert "diagonal" in line
    assert "pairs" not in line
    assert "eval/diagonal" in plotted(evaluation)
    assert not any("pairs" in name or "share" in name for name in plotted(evaluation))
    saved = load(sorted((home / "checkpoints").glob("step-*"))[-1])
    assert {"loss", "diagonal"} <= saved.loop["metrics"].keys()
    assert "pairs" not in saved.loop["metrics"]


def made(corpus: Path, cache: Path) -> Plan:
    config = config_of(tiny_values(corpus))
    return plan(config, MACHINE, ragged_task(config, cache).facts())


def test_sums_are_put_apart_and_together_again() -> None:
    specs = {"a": SumSpec(), "b": SumSpec((2, 2), integer=True), "c": SumSpec((3,))}
    sums = unpack_sums(specs, np.array([0.5, 1.0, 2.0, 3.0]), np.array([1, 2, 3, 1 << 60]))
    assert sums["a"] == 0.5
    assert np.asarray(sums["b"]).tolist() == [[1, 2], [3, 1 << 60]]
    assert np.asarray(sums["c"]).tolist() == [1.0, 2.0, 3.0]
    with pytest.raises(UserError, match="shape"):
        check_shape("b", (3, 3), specs["b"])
    assert journal_value(np.array([[1.0, np.nan]])) == [[1.0, None]]
    assert journal_value([np.float32(2), (1, float("inf"))]) == [2.0, [1, None]]
    assert line_of(Event("evaluated", 1, {"pairs": journal_value(np.eye(2, dtype=int))})).count("[")


@pytest.mark.parametrize(
    "picture",
    [
        np.zeros((3, 5)),
        np.zeros((3, 5, 4), np.uint8),
        np.zeros((0, 5), np.uint8),
        np.zeros(3, np.uint8),
        3,
    ],
)
def test_what_is_no_picture_is_refused(picture: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="sample"):
        check_picture(picture)
    with pytest.raises(UserError, match="sample"):
        keep_pictures(tmp_path, 1, [picture])


def test_a_report_shows_small_arrays(
    evaluated: Run, corpus: Path, cache: Path, tmp_path: Path
) -> None:
    reference = evaluated("torch", "single", 1)
    home = tmp_path / "torch-single-1-False"
    (home / "plan.json").write_text(json.dumps({"plan": made(corpus, cache).to_json()}))
    story = read_run(home, live=False)
    blocks = list(evaluations(story))
    first = [block.get("text") for block in blocks].index("pairs at step 2")
    counts, scores = [block["rows"] for block in blocks[first:] if block["type"] == "table"][:2]
    assert [cell["text"] for cell in counts[1][1:]] == list(map(str, reference["pairs"][1]))
    right, samples = reference["pairs"][1][1], sum(reference["pairs"][1])
    assert (scores[1][1], scores[1][3]) == (samples, f"{right / samples:.4f}")
    assert counts[1][2]["share"] == round(right / samples, 3)
