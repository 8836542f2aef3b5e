"""An evaluation on the training split sees images as they are, whoever reads them."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from class_pictures import make_folder

from commands import samecurve
from samecurve.core.config.document import Document
from samecurve.core.config.loading import load
from samecurve.data import held_out_data
from samecurve.launch.evaluate_run import Which, _loaded
from samecurve.run.directory.run_directory import Run
from samecurve.tasks import Tasks, open_task
from samecurve.tasks.vision.data.recipe import AugmentedRows

AUGMENT = {"crop": 0.3, "flip": 0.5, "color": 0.4, "mixup": 0.4}


def write_config(home: Path) -> Path:
    make_folder(home / "set", {"disc": 8, "ring": 8})
    values = {
        "task": "vision",
        "model": {"width": 8, "depth": 1, "heads": 2, "patch": 8},
        "data": {
            **{"source": str(home / "set"), "resolution": 24, "validation": 0.25, "workers": 1},
            "augment": AUGMENT,
        },
        "batch": {"samples": 6},
        "train": {"steps": 3, "precision": "f64"},
        "devices": {"use": "cpu:1"},
    }
    file = home / "mine.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


def test_the_training_split_is_read_without_its_recipe(tmp_path: Path, cache: Path) -> None:
    values = yaml.safe_load(write_config(tmp_path).read_text())
    run = Run(tmp_path / "run")
    run.home.mkdir()
    (run.home / "config.yaml").write_text(yaml.safe_dump(values))
    expected: dict[Which, bool] = {"train": False, "held-out": True}
    for which, is_augmented in expected.items():
        config = _loaded(run, {}, None, which).config
        task = open_task(config, str(cache))
        rows = task.train_data()
        assert isinstance(rows._data, AugmentedRows) is is_augmented
        assert held_out_data(task, which)["eval"] is (
            rows if which == "train" else task.eval_data()
        )
    config = load(Document(values), Tasks()).config
    task = open_task(config, str(cache))
    assert held_out_data(task, "test")["eval"] is task.test_data()


@pytest.mark.long
def test_a_run_is_measured_on_what_it_was_trained_on(tmp_path: Path) -> None:
    """With data workers and without; the same as a run whose config has no recipe."""
    file = write_config(tmp_path)
    samecurve("train", "-f", file, "--save-dir", "run", cwd=tmp_path)
    without = tmp_path / "without"
    shutil.copytree(tmp_path / "run", without)
    kept = yaml.safe_load((without / "config.yaml").read_text())
    assert kept["data"].pop("augment")["flip"] == AUGMENT["flip"]
    (without / "config.yaml").write_text(yaml.safe_dump(kept))

    def measured(run: str, *line: str) -> dict[str, float]:
        done = samecurve("eval", run, "--on", "train", "--json", *line, cwd=tmp_path)
        scores: dict[str, float] = json.loads(done.stdout)
        return {name: scores[name] for name in ("loss", "accuracy", "top5")}

    expected = measured("without", "--num-workers", "0")
    assert measured("run") == expected
    assert measured("run", "--num-workers", "0") == expected
    done = samecurve("eval", "run", "--on", "train", "--json", cwd=tmp_path)
    assert sum(map(sum, json.loads(done.stdout)["confusion"])) == 12  # of 16, a quarter held out
