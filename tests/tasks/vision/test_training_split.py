"""models/image-folder.yaml learns; an evaluation on the training split sees images as they are,
whoever reads them.
"""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from class_pictures import make_folder

from commands import samecurve
from samecurve.core.config.document import Document
from samecurve.core.config.loading import load_document
from samecurve.data import held_out_data
from samecurve.launch.evaluate_run import Which, _loaded
from samecurve.run.directory import Run
from samecurve.tasks import Tasks, open_task
from samecurve_products.pictures.vision.data.recipe import AugmentedRows

ROOT = Path(__file__).parents[3]
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
    config = load_document(Document(values), Tasks()).config
    task = open_task(config, str(cache))
    assert held_out_data(task, "test")["eval"] is task.test_data()


@pytest.mark.long
def test_a_run_is_measured_on_what_it_was_trained_on(tmp_path: Path) -> None:
    """By a data worker; the same as a run whose config has neither workers nor a recipe."""
    file = write_config(tmp_path)
    samecurve("train", "-f", file, "--save-dir", "run", cwd=tmp_path)
    without = tmp_path / "without"
    shutil.copytree(tmp_path / "run", without)
    kept = yaml.safe_load((without / "config.yaml").read_text())
    assert kept["data"].pop("augment")["flip"] == AUGMENT["flip"]
    assert kept["data"].pop("workers") == 1
    (without / "config.yaml").write_text(yaml.safe_dump(kept))

    def measured(run: str) -> dict[str, float]:
        done = samecurve("eval", run, "--on", "train", "--json", cwd=tmp_path)
        scores = json.loads(done.stdout)
        assert sum(map(sum, scores["confusion"])) == 12  # of 16, a quarter is held out
        return {name: scores[name] for name in ("loss", "accuracy", "top5")}

    assert measured("run") == measured("without")


@pytest.mark.long
@pytest.mark.skipif(find_spec("timm") is None, reason="pip install --no-deps timm")
def test_the_model_for_a_folder_of_pictures_learns(tmp_path: Path) -> None:
    """The whole config, with smaller pictures and batches: 24 pictures of each class."""
    make_folder(tmp_path / "set", {"disc": 24, "ring": 24, "square": 24}, side=96)
    smaller = ["data.resolution=64", "data.workers=1", "data.validation=0.25", "train.steps=12ep"]
    rarely = ["train.eval_every=6ep", "train.save_every=6ep", "train.sample_every=12ep"]
    settings = [word for value in (*smaller, *rarely) for word in ("--set", value)]
    line = ("-f", ROOT / "models/image-folder.yaml", "-d", "set", "--global-batch", 16)
    where = ("--devices", "cpu:1", "--save-dir", "run")
    samecurve("train", *line, *settings, *where, cwd=tmp_path, timeout=1800)
    done = samecurve("eval", "run", "--json", cwd=tmp_path, timeout=600)
    assert json.loads(done.stdout)["accuracy"] > 0.9
    assert (
        list((tmp_path / "run/samples").glob("*.png"))
        or "no wrong answer" in (tmp_path / "run/journal.jsonl").read_text()
    )
