"""Code that came with a run, or lies outside of the project, is asked about before it is run."""

import shutil
from pathlib import Path

import pytest

from checkpoint_files import save
from commands import refused, samecurve
from samecurve.errors import UserError
from samecurve.run.directory import Run
from samecurve.run.trust import check_trusted
from samecurve.tasks.user_class import TASK_PICKLE
from samecurve.tasks.user_class.pickled_class import remember

CLASS = "import pathlib\npathlib.Path(__file__).with_name('was_run').touch()\nclass Task: ..."


def received(home: Path, task: str) -> Run:
    """A run directory that names a task."""
    home.mkdir(parents=True)
    (home / "config.yaml").write_text(f"task: {task}\nbatch: {{samples: 8}}\n")
    return Run(home)


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ("{project}/mine.py:Task", None),
        ("mine.py:Task", None),
        ("language", None),
        ("numpy.linalg:LinAlgError", None),
        ("{project}/run/with_it.py:Task", "it came with the run"),
        ("run/with_it.py:Task", "it came with the run"),
        ("{project}/link.py:Task", "it does not lie in this project"),
        ("{elsewhere}/other.py:Task", "it does not lie in this project"),
        ("../elsewhere/other.py:Task", "it does not lie in this project"),
        ("{project}/run/task.pickle:Task", "no session of yours"),
    ],
)
def test_whose_code_it_is(
    task: str, says: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    elsewhere.mkdir()
    run = received(project / "run", task.format(project=project, elsewhere=elsewhere))
    for file in (project / "mine.py", project / "run/with_it.py", elsewhere / "other.py"):
        file.write_text(CLASS)
    (project / "link.py").symlink_to(elsewhere / "other.py")
    run.task.write_bytes(b"{}\nno pickle")
    monkeypatch.chdir(project)
    if says is None:
        check_trusted(run, trust=False, where="RUN")
    else:
        with pytest.raises(UserError, match=says):
            check_trusted(run, trust=False, where="RUN")
    check_trusted(run, trust=True, where="RUN")
    assert not list(tmp_path.rglob("was_run"))


def test_a_class_that_was_kept_here_is_known_by_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAMECURVE_CACHE", str(tmp_path / "cache"))
    run = received(tmp_path / "run", f"{tmp_path / 'run' / TASK_PICKLE}:Task")
    run.task.write_bytes(b"{}\nas it was kept")
    remember(run.task)
    check_trusted(run, trust=False, where="RUN")
    run.task.write_bytes(b"{}\nas somebody changed it")
    with pytest.raises(UserError, match="no session of yours"):
        check_trusted(run, trust=False, where="RUN")


TASK = """\
import pathlib
import numpy as np, torch
from samecurve import Mean, Section

pathlib.Path(__file__).with_name("was_run").touch()

class Rows:
    def __len__(self):
        return 16
    def __getitem__(self, ids):
        return {"x": np.asarray(ids, dtype="float32")[:, None]}

class Task:
    class Model(Section): ...

    def __init__(self, model, data): ...
    def model(self):
        return torch.nn.Linear(1, 1)
    def train_data(self):
        return Rows()
    def eval_data(self):
        return Rows()
    def loss(self, model, batch):
        return Mean(model(batch["x"]).square().sum(), len(batch["x"]))
    def sample(self, model, seed):
        return ["sampled"]
"""


def sent(sender: Path) -> Path:
    """A config whose class leaves a file when it is imported."""
    sender.mkdir()
    (sender / "task.py").write_text(TASK)
    config = sender / "c.yaml"
    config.write_text(
        f"task: {sender}/task.py:Task\nbatch: {{samples: 8}}\ntrain: {{steps: 2}}\n"
        "devices: {use: cpu}\n"
    )
    return config


def test_verbs_ask_before_they_open_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The class declares a section, for which reading the config alone would import it."""
    config = sent(tmp_path / "sender")
    run = Run(tmp_path / "receiver" / "run")
    run.checkpoints.mkdir(parents=True)
    save(run.checkpoints, 2)
    shutil.copy(config, run.config)
    run.plan.write_text("{}")
    for arguments in (["eval", "run"], ["sample", "run"], ["export", "run", "--to", "out"]):
        says = refused(monkeypatch, capsys, *arguments, cwd=run.home.parent)
        assert f"{config.parent}/task.py" in says
        assert "--trust" in says
    assert not (config.parent / "was_run").exists()


@pytest.mark.long
def test_what_needs_no_model_asks_nothing_and_imports_nothing(tmp_path: Path) -> None:
    config, receiver = sent(tmp_path / "sender"), tmp_path / "receiver"
    receiver.mkdir()
    was_run = config.parent / "was_run"
    samecurve("train", "-f", config, "--save-dir", receiver / "run", cwd=config.parent)
    was_run.unlink()
    shutil.copytree(receiver / "run", receiver / "same")
    for arguments in (["compare-runs", "run", "same"], ["report", "run", "--json"]):
        samecurve(*arguments, cwd=receiver)
        assert not was_run.exists(), arguments
    assert "sampled" in samecurve("sample", "run", "--trust", cwd=receiver).stdout
    assert was_run.exists()
