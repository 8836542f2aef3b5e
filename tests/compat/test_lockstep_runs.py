"""A run of the program before it was called Samecurve is gone on with, and read.

old_run/run was stopped after 4 of 8 steps, on two CPU ranks; LOSSES are those of that program's
unbroken run.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from commands import losses, samecurve
from samecurve.errors import UserError
from samecurve.observe import read_events
from samecurve.tasks.user_class import Place
from samecurve.tasks.user_class.load_class import load_class
from samecurve_products.trackers.tensorboard import TensorBoard

LOSSES = [
    5.5460978690346465,
    5.516103127175991,
    5.4141077676624345,
    5.276328499787665,
    5.141308605511734,
    5.05691190589058,
    5.0043525328537655,
    4.975722628194387,
]
VALIDATION_LOSS = 5.149834358336965  # after step 4


@pytest.fixture
def home(tmp_path: Path) -> Path:
    shutil.copytree(Path(__file__).with_name("old_run"), tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.mark.parametrize("engine", ["torch", pytest.param("jax", marks=pytest.mark.long)])
def test_it_goes_on_with_the_same_curve(engine: str, home: Path) -> None:
    arguments = ("train", "-f", "small.yaml", "--save-dir", "run", "--devices", "cpu:1")
    samecurve(*arguments, "--engine", engine, cwd=home)
    np.testing.assert_allclose(losses(home / "run"), LOSSES, rtol=1e-12)
    resumed = [
        event for event in read_events(home / "run/journal.jsonl") if event.kind == "resumed"
    ]
    assert [event.step for event in resumed] == [4]


def test_its_tensorboard_file_is_gone_on_with(tmp_path: Path) -> None:
    """Two files of one run would show every point twice."""
    folder = tmp_path / "logs/tensorboard"
    folder.mkdir(parents=True)
    (folder / "events.out.tfevents.lockstep").write_bytes(b"12345")
    TensorBoard(tmp_path, {"size": 5}, "file", "").close()
    assert [path.name for path in folder.iterdir()] == ["events.out.tfevents.samecurve"]
    assert (folder / "events.out.tfevents.samecurve").read_bytes() == b"12345"


def test_a_task_that_imports_the_old_name_is_told_the_new_one(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from lockstep import Mean\n\n\nclass Mine: ...\n")
    with pytest.raises(UserError) as refusal:
        load_class(Place(tmp_path / "mine.py", "Mine"))
    assert "from samecurve import Mean" in str(refusal.value.remedy)


def test_it_is_read(home: Path) -> None:
    answer = samecurve("eval", "run", "--devices", "cpu:1", "--json", cwd=home).stdout
    assert json.loads(answer)["loss"] == pytest.approx(VALIDATION_LOSS, rel=1e-12)
    samecurve("export", "run", "--to", "weights", cwd=home)
    assert (home / "weights/model.safetensors").is_file()
