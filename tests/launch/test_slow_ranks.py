"""A rank that the others wait for is named in the journal, with what it takes longer for; nobody is where all are alike."""

import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from starts import start, values

from lockstep.core.mean import Mean
from lockstep.core.pace import Laggards
from lockstep.core.protocols import Arrays
from lockstep.data.tokens import TokenWindows
from lockstep.launch.rehearsal import rehearse
from lockstep.observe.journal import read
from lockstep.tasks.language.torch_task import TorchLanguage
from worlds import Pool

STEPS = 60  # it takes 50 for a mean to say something


def at_work(index: int, group: Any, argument: str) -> None:
    """Train; the second rank's model takes its time."""
    right = TorchLanguage.loss

    def slow(task: TorchLanguage, model: Any, batch: Arrays) -> Mean:
        time.sleep(0.04 * index)
        return right(task, model, batch)

    with patch.object(TorchLanguage, "loss", slow):
        rehearse(index, group, argument)


def at_its_data(index: int, group: Any, argument: str) -> None:
    right = TokenWindows.__getitem__

    def slow(windows: TokenWindows, ids: Any) -> Any:
        time.sleep(0.08 * index)
        return right(windows, ids)

    with patch.object(TokenWindows, "__getitem__", slow):
        rehearse(index, group, argument)


@pytest.mark.parametrize(("where", "says"), [(at_work, "times as long as the others for its forward pass"), (at_its_data, "for its data, the others")])
def test_the_second_rank_is_named(where: Any, says: str, pool: Pool, tmp_path: Path, corpus: Path) -> None:
    prepared = start(tmp_path / "run", values(corpus, "ddp:2", data={"prefetch": 0}, train={"steps": STEPS, "precision": "f64"}), tmp_path)
    pool.run(2, where, prepared.attempt.to_json())
    found = [event for event in read(prepared.run.journal) if event.kind == "slow"]
    assert [event.values["rank"] for event in found] == [1]
    assert says in found[0].values["text"]


def test_ranks_that_are_alike_are_left_alone() -> None:
    """Noise of a tenth, a first step that compiles, one odd step; a lone rank that waits for data is no laggard."""
    laggards, lone = Laggards(), Laggards()
    for step in range(500):
        seconds = 30.0 if not step else 5.0 if step == 300 else 0.1
        assert laggards.add(seconds, [0.001, 0.0012, 0.0011], [0.03, 0.033 - 0.003 * (step % 2), 0.4 if step == 300 else 0.03]) == []
        assert lone.add(0.1, [0.09], [0.01]) == []
