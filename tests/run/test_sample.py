"""`samecurve sample`."""

from pathlib import Path

import pytest

from commands import (
    refused,
    warm_output,
)
from worlds import Pool


def test_sample_says_the_same_for_the_same_seed(
    pool: Pool,
    unbroken_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, second, other = (
        pool.run(
            1,
            warm_output,
            tmp_path,
            "sample",
            unbroken_run,
            "--prompt",
            "the ",
            "--tokens",
            30,
            "--seed",
            seed,
        )[0]
        for seed in (1, 1, 2)
    )
    assert first == second != other
    assert first.startswith("the ")
    assert "neither a run directory" in refused(
        monkeypatch, capsys, "sample", tmp_path, cwd=tmp_path
    )
