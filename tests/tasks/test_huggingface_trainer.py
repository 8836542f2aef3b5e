"""Where HF Trainer is right (one device, no accumulation, no dropout) its losses are ours."""

from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_twenty_steps_are_those_of_hf_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents of unlike length in our order; the library's Trainer takes the library's mean."""
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.common import spread
    from benchmarks.same_batch import ours
    from benchmarks.same_batch_sides import CASES, ORDERED, run_cases

    mine = ours(CASES[ORDERED], 1, tmp_path / "ours")
    theirs = run_cases("trainer", [ORDERED], tmp_path)[ORDERED]
    assert len(mine["losses"]) == 20
    assert spread([mine["losses"], theirs["losses"]]) < 1e-5
    assert abs(mine["held_out"] - theirs["held_out"]) < 1e-5
    assert mine["losses"][0] - mine["losses"][-1] > 0.5  # it learnt something
