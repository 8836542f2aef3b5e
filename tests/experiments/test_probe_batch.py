"""--probe-batch finds the largest microbatch that fits, in few tries, and asks for nothing that
can't.
"""

import json
from pathlib import Path

import pytest

from commands import samecurve, write_config
from samecurve.experiments.probe_batch import largest_fitting


@pytest.mark.parametrize(
    ("share", "held", "each", "fits"),
    [
        (64, 100, 10, 64),
        (64, 500, 10, 50),
        (64, 500, 499, 1),
        (64, 995, 10, 0),
        (1, 100, 10, 1),
        (1000, 0, 7, 142),
    ],
)
def test_the_largest_that_fits_is_found_in_few_tries(
    share: int, held: int, each: int, fits: int
) -> None:
    """A limit of 1000; memory grows in a line, as activations do."""
    tried: list[int] = []

    def peak(size: int) -> int | None:
        tried.append(size)
        memory = held + each * size
        return memory if memory <= 1000 else None

    assert largest_fitting(share, 1000, peak) == fits
    assert len(tried) <= 5
    assert max(tried) <= max(2, fits + 1)


def test_what_grows_otherwise_is_still_bounded() -> None:
    """An allocator that rounds up: the line overshoots, and what failed is never taken."""
    assert largest_fitting(64, 1000, lambda size: None if size > 11 else 100 * -(-size // 4)) == 11


@pytest.mark.long
def test_a_plan_from_what_was_tried(tmp_path: Path, corpus: Path) -> None:
    """Real throw-away ranks; the limit leaves room for the whole share."""
    done = samecurve(
        "plan",
        "-f",
        write_config(tmp_path, corpus),
        "--devices",
        "cpu:2",
        "--probe-batch",
        "--json",
        cwd=tmp_path,
        timeout=300,
    )
    plan = json.loads(done.stdout)["plan"]
    assert "5 samples at once were tried and fitted" in plan["because"]["memory"]
    assert plan["micro"] == 5
    assert not (tmp_path / "runs").exists()
