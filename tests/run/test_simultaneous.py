"""Starts that meet in one new directory: one of them begins the run, the others are told so."""

import os
from pathlib import Path

import pytest

from samecurve.errors import UserError
from samecurve.run.directory import Lock, Run
from samecurve.run.preconditions import make_home


def test_a_directory_that_another_start_is_making(tmp_path: Path) -> None:
    """It has checkpoints/ and no plan.json yet, as a start leaves it that was cut off."""
    run = Run(tmp_path / "run")
    make_home(run.home)
    (run.home / f".writable-{os.getpid() + 1}").touch()  # of a start that looks as this one does
    make_home(run.home)
    lock = Lock(run)
    run.checkpoints.mkdir()
    with pytest.raises(UserError, match="belongs to a live run: process"):
        make_home(run.home)
    lock.release()
    make_home(run.home)
