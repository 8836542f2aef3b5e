"""How well task vision learns: digits, and Pathfinder with its control."""

import json
import time
from pathlib import Path

import pytest

from commands import samecurve

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


def trained(home: Path, *line: str, seconds: float = 1800) -> float:
    """The accuracy on the test images of a run."""
    samecurve("train", *line, "--save-dir", "run", cwd=home, timeout=seconds)
    results = json.loads((home / "run/results.json").read_text())
    accuracy: float = results["test"]["accuracy"]
    return accuracy


@pytest.mark.parametrize("cssm", ["attention", "gated"])
def test_digits_are_read_in_two_minutes(cssm: str, tmp_path: Path) -> None:
    """97 % of the test images, on two CPU ranks."""
    begin = time.monotonic()
    line = ("-f", str(ROOT / "models/digits.yaml"), "--cssm", cssm, "--devices", "cpu:2")
    assert trained(tmp_path, *line) > 0.97
    assert time.monotonic() - begin < 120


def test_pathfinder_is_learnt_from_what_lies_between_the_dots(tmp_path: Path) -> None:
    """On 2,000 other images; a model of the same size that mixes nothing over space is at chance.

    A distance or a place of the dots would do for the control, too.
    """
    line = ("-f", str(ROOT / "models/cssm.yaml"), "--devices", "cpu:2")
    assert trained(tmp_path, *line) > 0.85
    control = ("--cssm", "no_fft", "--engine", "torch", "--max-steps", "1250", "--save-dir", "none")
    samecurve("train", *line, *control, cwd=tmp_path, timeout=1800)
    results = json.loads((tmp_path / "none/results.json").read_text())
    assert abs(results["test"]["accuracy"] - 0.5) < 0.05
