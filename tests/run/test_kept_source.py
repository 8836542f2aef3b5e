"""A run keeps the source of its task's class: an edit is said or refused, and the trained model can
be used wherever and whenever.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import samecurve as library
from commands import refused, samecurve
from samecurve.errors import UserError
from samecurve.run.directory import Run
from samecurve.run.trust import check_trusted
from samecurve.tasks.user_class import SOURCE_INDEX, SOURCES, Place
from samecurve.tasks.user_class.kept_source import keep_source, read_kept_source
from samecurve.tasks.user_class.load_class import load_class
from samecurve.tasks.user_class.local_imports import local_files

TASK = """\
import numpy as np, torch
from samecurve import Mean
from width import WIDTH  # a module beside this file

class Rows:
    def __len__(self):
        return 16
    def __getitem__(self, ids):
        return {"x": np.asarray(ids, dtype="float32")[:, None] / 16}

class Task:
    def __init__(self, model, data): ...
    def model(self):
        return torch.nn.Linear(1, WIDTH)
    def train_data(self):
        return Rows()
    def eval_data(self):
        return Rows()
    def loss(self, model, batch):
        return Mean(model(batch["x"]).square().sum(), len(batch["x"]))
    def sample(self, model, seed):
        return [f"width {WIDTH}"]
"""
CONFIG = "task: mine.py:Task\nbatch: {samples: 8}\ntrain: {steps: 4}\ndevices: {use: cpu}\n"
Said = Callable[..., str]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    home = tmp_path / "project"
    home.mkdir()
    (home / "mine.py").write_text(TASK)
    (home / "width.py").write_text("WIDTH = 1\n")
    (home / "c.yaml").write_text(CONFIG)
    return home


def test_an_edited_task_is_said_or_refused_and_never_trained_in_silence(
    project: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    train = ["train", "-f", "c.yaml", "--save-dir", "run"]
    samecurve(*train, "--stop-after", 2, cwd=project)
    (project / "mine.py").write_text(TASK.replace("  # a module beside this file", ""))
    assert "warn" not in samecurve(*train, "--stop-after", 1, cwd=project).stdout  # a comment

    (project / "mine.py").write_text(TASK.replace("square", "abs"))
    said = " ".join(samecurve(*train, cwd=project).stdout.split())
    assert "mine.py changed since this run was started with it: it goes on with the new" in said
    assert "run/source-until-step-3 has the source as it was" in said
    assert "abs()" in (project / "run/source/mine.py").read_text()
    assert "square()" in (project / "run/source-until-step-3/mine.py").read_text()
    assert "trained before" in samecurve(*train, cwd=project).stdout  # the same command again

    said = refused(monkeypatch, capsys, *train, "--lr", "0.5", cwd=project)
    assert "trained to its end, so that a change can have no effect: optimizer.lr" in said
    (project / "mine.py").write_text(TASK)
    said = refused(monkeypatch, capsys, *train, cwd=project)
    assert "can have no effect: mine.py changed" in said
    (project / "width.py").write_text("WIDTH = 2\n")
    said = refused(monkeypatch, capsys, *train, "--max-steps", "9", cwd=project)
    assert "its model has other arrays" in said
    assert "weight [1, 1], here [2, 1]" in said

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for gone in (False, True):
        if gone:
            (project / "mine.py").unlink()
        assert "width 1" in samecurve("sample", "../project/run", cwd=elsewhere).stdout
    assert "eval   step 4" in samecurve("eval", "../project/run", cwd=elsewhere).stdout
    samecurve("export", "../project/run", "--to", "out", cwd=elsewhere)
    monkeypatch.chdir(elsewhere)
    assert library.load(project / "run").weight.shape == (1, 1)


def test_the_files_that_a_class_is_made_of(tmp_path: Path) -> None:
    package = tmp_path / "package"
    (package / "parts").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "task.py").write_text("from .parts import one\nimport numpy\nclass Task: ...\n")
    (package / "parts/__init__.py").write_text("from .. import shared")
    (package / "parts/one.py").write_text("import package.other")
    for name in ("shared", "other", "unused"):
        (package / f"{name}.py").write_text("")
    (tmp_path / "numpy_like.py").write_text("")
    local = local_files(Place(package / "task.py", "Task", "package.task"))
    assert local.root == tmp_path
    names = ["__init__", "other", "parts/__init__", "parts/one", "shared", "task"]
    assert sorted(local.sources) == [f"package/{name}.py" for name in names]


def test_two_runs_keep_two_versions_of_one_module(project: Path, tmp_path: Path) -> None:
    """Their neighbours have one name, and each class gets its own."""
    for width in (1, 2):
        (project / "width.py").write_text(f"WIDTH = {width}\n")
        assert keep_source(tmp_path / f"run{width}", f"{project}/mine.py:Task", step=0) is None
    for width in (1, 2, 1):
        kept = read_kept_source(tmp_path / f"run{width}")
        assert kept is not None
        path, name = kept.kept_task.rsplit(":", 1)
        assert load_class(Place(Path(path), name))(None, None).sample(None, 0) == [f"width {width}"]


def test_only_source_that_was_kept_here_is_run_unasked(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAMECURVE_CACHE", str(tmp_path / "cache"))
    run, task = Run(tmp_path / "run"), f"{project}/mine.py:Task"
    run.home.mkdir()
    run.config.write_text(f"task: {task}\n")
    keep_source(run.home, task, step=0)
    (project / "mine.py").unlink()
    check_trusted(run, trust=False, where="RUN")
    (run.home / SOURCES / "width.py").write_text("WIDTH = 3\n")
    with pytest.raises(UserError, match="it came with the run"):
        check_trusted(run, trust=False, where="RUN")


@pytest.mark.parametrize("name", ["../mine.py", "/etc/passwd", "link.py", "a/link.py", "none.py"])
def test_an_index_names_files_of_the_copy_alone(name: str, project: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    keep_source(run, f"{project}/mine.py:Task", step=0)
    (run / SOURCES / "link.py").symlink_to(project / "mine.py")
    (run / SOURCES / "a").symlink_to(project)
    index = run / SOURCES / SOURCE_INDEX
    values = json.loads(index.read_text())
    assert read_kept_source(run) is not None
    index.write_text(json.dumps({**values, "files": {**values["files"], name: "0"}}))
    assert read_kept_source(run) is None
