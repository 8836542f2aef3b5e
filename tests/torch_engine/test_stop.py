"""A stop is heard in the step in flight."""

from pathlib import Path

import pytest

from rank_runs import train_on_ranks
from samecurve.core.config.document import Document
from samecurve.core.config.loading import load_document
from samecurve.core.planning.planner import plan
from samecurve.tasks import Tasks, open_task
from tiny import MACHINE
from worlds import Pool


@pytest.mark.parametrize("layout", ["single:1", "dp:2", "ddp:2", "fsdp:2", "exact:2"])
def test_a_stop_is_heard_in_the_step_in_flight(layout: str, pool: Pool, tmp_path: Path) -> None:
    """By all ranks, though one was asked, while it computed: no further step is begun."""
    strategy, _, world = layout.partition(":")
    values = {
        "task": f"{Path(__file__).parent}/loops.py:Annealed",
        "batch": {"samples": 10},
        "train": {"steps": 8, "precision": "f64", "exact": strategy == "exact"},
        "devices": {"use": f"cpu:{world}", "strategy": strategy.replace("exact", "ddp")},
    }
    config = load_document(Document(values), Tasks()).config
    made = plan(config, MACHINE, open_task(config, "").facts())
    events = train_on_ranks(pool, tmp_path, config, made, ask_in="step")
    assert [event.step for event in events if event.kind == "step"] == [1]
    assert (events[-1].kind, events[-1].step) == ("stopped", 1)
