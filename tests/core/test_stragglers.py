"""A rank that the others wait for is named in the journal, with what it takes longer for; nobody is
where all are alike.
"""

import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from samecurve.core.determinism import Mean
from samecurve.core.measurement.stragglers import StragglerDetector
from samecurve.core.protocols import Arrays
from samecurve.data import TokenWindows
from samecurve.observe import read_events
from samecurve.worker.jobs.train_job import rehearse
from samecurve_products.text.language.torch_task import TorchLanguage
from starts import start, values
from worlds import Pool

WINDOW, STEPS = 20, 25  # steps that are compared, of so many


def slow(index: int, group: Any, argument: str) -> None:
    """Train; the second rank's model and data take their time."""
    loss, read_rows = TorchLanguage.loss, TokenWindows.__getitem__

    def slow_loss(task: TorchLanguage, model: Any, batch: Arrays) -> Mean:
        time.sleep(0.1 * index)
        return loss(task, model, batch)

    def slow_data(windows: TokenWindows, ids: Any) -> Any:
        time.sleep(0.15 * index)
        return read_rows(windows, ids)

    with (
        patch.object(TorchLanguage, "loss", slow_loss),
        patch.object(TokenWindows, "__getitem__", slow_data),
        patch("samecurve.core.measurement.stragglers._WINDOW", WINDOW),
    ):
        rehearse(index, group, argument)


@pytest.mark.long
def test_the_second_rank_is_named(pool: Pool, tmp_path: Path, corpus: Path) -> None:
    """For its data, and for its forward pass, once each."""
    prepared = start(
        tmp_path / "run",
        values(corpus, "ddp:2", data={"prefetch": 0}, train={"steps": STEPS, "precision": "f64"}),
        tmp_path,
    )
    pool.run(2, slow, prepared.attempt.to_json())
    found = [event.values for event in read_events(prepared.run.journal) if event.kind == "slow"]
    assert [values["rank"] for values in found] == [1, 1]
    assert found[0]["wait_seconds"] > 0.14
    assert "for its data, the others" in found[0]["text"]
    assert "times as long as the others for its forward pass" in found[1]["text"]


def test_ranks_that_are_alike_are_left_alone() -> None:
    """Noise of a tenth, a first step that compiles, one odd step; a lone rank that waits for data
    is no laggard.
    """
    laggards, lone = StragglerDetector(), StragglerDetector()
    for step in range(500):
        seconds = 30.0 if not step else 5.0 if step == 300 else 0.1
        assert (
            laggards.add(
                seconds,
                [0.001, 0.0012, 0.0011],
                [0.03, 0.033 - 0.003 * (step % 2), 0.4 if step == 300 else 0.03],
            )
            == []
        )
        assert lone.add(0.1, [0.09], [0.01]) == []


def test_a_slow_rank_that_has_less_to_do_holds_nobody_up() -> None:
    """Three times as long for a microbatch, and a third of them; assigned evenly it would be named,
    with what helps.
    """
    uneven, even = StragglerDetector((3, 1)), StragglerDetector((), "; the remedy")
    found = [
        [*laggards.add(0.1, [0.0, 0.0], [0.01, 0.03])]
        for _ in range(60)
        for laggards in (uneven, even)
    ]
    assert [one["rank"] for said in found[::2] for one in said] == []
    assert [
        (one["rank"], one["text"].endswith("; the remedy")) for said in found[1::2] for one in said
    ] == [(1, True)]


def test_cpu_ranks_are_sent_to_the_load_of_their_cores() -> None:
    """No GPU is there for nvidia-smi to show."""
    for on_cpu, look in ((True, "`uptime` shows the load"), (False, "nvidia-smi or top")):
        detector = StragglerDetector(on_cpu=on_cpu)
        slow = [line for _ in range(50) for line in detector.add(0.1, [0, 0], [0.02, 0.08])]
        assert [look in line["text"] for line in slow] == [True]
