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
