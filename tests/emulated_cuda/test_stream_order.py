"""Under fsdp a GPU gathers the next block, and sums the last one, while it computes a block."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from emulated import only_emulated
from gpu_runs import environment
from stream_order import LAYERS

pytestmark = only_emulated


def beside(home: Path, corpus: Path, *, planted: bool) -> dict[str, list[Any]]:
    """By reducer, for each rank: what may be done beside the computation of each block."""
    answers = home / "answers.json"
    done = subprocess.run(
        [sys.executable, "-m", "stream_order", answers, corpus, "planted" if planted else ""],
        cwd=home,
        env=environment(2),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert not done.returncode, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    found: dict[str, list[Any]] = json.loads(answers.read_text())
    return found


def missing(found: dict[str, list[str]]) -> list[tuple[str, str]]:
    """What a rank should do beside the computation of a block, and does not."""
    wanted = []
    for number in range(LAYERS):
        forward, backward = f"forward layers.{number}", f"backward layers.{number}"
        if number + 1 < LAYERS:
            wanted += [(forward, f"gather layers.{number + 1}")]
            wanted += [(backward, f"sum layers.{number + 1}")]
        if number:
            wanted += [(backward, f"gather layers.{number - 1} again")]
    return [(computed, work) for computed, work in wanted if work not in found[computed]]


@pytest.mark.long  # ranks on emulated GPUs; test_compile.py has the order of calls, on CPUs
def test_the_next_gather_and_the_last_sum_lie_beside_the_computation(
    tmp_path: Path, corpus: Path
) -> None:
    for of_ranks in beside(tmp_path, corpus, planted=False).values():
        assert [missing(found) for found in of_ranks] == [[], []]


@pytest.mark.long
def test_a_gather_that_is_waited_for_at_once_is_seen(tmp_path: Path, corpus: Path) -> None:
    for of_ranks in beside(tmp_path, corpus, planted=True).values():
        for found in of_ranks:
            gathers = [work for _, work in missing(found) if work.startswith("gather")]
            assert len(gathers) == 2 * (LAYERS - 1)  # all
