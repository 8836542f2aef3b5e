"""`samecurve sample`."""

from pathlib import Path

import pytest

from commands import (
    refused,
    samecurve,
)


def test_sample_says_the_same_for_the_same_seed(
    unbroken_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, second, other = (
        samecurve(
            "sample", unbroken_run, "--prompt", "the ", "--tokens", 30, "--seed", seed, cwd=tmp_path
        ).stdout
        for seed in (1, 1, 2)
    )
    assert first == second != other
    assert first.startswith("the ")
    assert "neither a run directory" in refused(
        monkeypatch, capsys, "sample", tmp_path, cwd=tmp_path
    )
