"""A stranger's package: a task, a verb, a tracker and an importer, with the seam alone."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FILES = {
    "strange/task.py": '''
import numpy as np
from torch import nn
from samecurve.seam import DataSection, Mean, Section, TaskEntry

class Line(Section):
    """The model section."""
    slope: float = 2.0

class Points(DataSection):
    """The data section."""
    count: int = 40

class Rows:
    def __init__(self, slope, count):
        self.x, self.slope = np.linspace(-1, 1, count, dtype=np.float32)[:, None], slope
    def __len__(self):
        return len(self.x)
    def __getitem__(self, ids):
        return {"x": self.x[ids], "y": self.slope * self.x[ids]}

class Fit:
    def __init__(self, model, data):
        self.slope, self.count = model.slope, data.count
    def model(self):
        return nn.Linear(1, 1)
    def loss(self, model, batch):
        error = model(batch["x"]) - batch["y"]
        return Mean(error.square().sum(), len(error))
    def train_data(self):
        return Rows(self.slope, self.count)

ENTRY = TaskEntry(classes={"torch": "strange.task:Fit"}, model=Line, data=Points)
''',
    "strange/verbs.py": '''
import click
from samecurve.seam import PATH, Run, Verb, echo, read_events

@click.command(cls=Verb, help_group="Look at runs")
@click.argument("run", type=PATH)
def last_loss(run):
    """The last loss of a RUN."""
    home = Run(run)
    home.check("RUN")
    echo([event.values["loss"] for event in read_events(home.journal) if event.kind == "step"][-1])
''',
    "strange/tracker.py": '''
class Lines:
    """A line for each step, in logs/lines/steps.txt."""
    def __init__(self, run, covered, mode, project):
        self.file = open(run / "logs/lines/steps.txt", "a")
    def take(self, event):
        if event.kind == "step":
            print(event.step, event.values["loss"], file=self.file)
    def flush(self):
        self.file.flush()
        return {}
    def close(self):
        self.file.close()
''',
    "strange/importer.py": """
from samecurve.seam import Document

class Old:
    tool, run_directory = "Strange Trainer", None
    def __init__(self, document):
        steps = document.value["strange_steps"]
        self.document = Document()
        for key, value in {"task": "fit", "batch.samples": 8, "train.steps": steps}.items():
            self.document.set(key, value, "the old config")
    def summary_lines(self):
        return ["read   strange_steps -> train.steps"]
    def unresolved(self, document):
        return []

def tool_of(document):
    return "Strange Trainer" if "strange_steps" in document.value else None

def convert(document, folder):
    return Old(document)
""",
    "strange-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: strange\nVersion: 1.0\n",
    "strange-1.0.dist-info/entry_points.txt": """
[samecurve.tasks]
fit = strange.task:ENTRY
[samecurve.verbs]
last-loss = strange.verbs:last_loss
[samecurve.trackers]
lines = strange.tracker:Lines
[samecurve.importers]
strange = strange.importer
""",
}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The package, as pip would leave it in a directory of installed ones."""
    site = tmp_path / "site"
    for name, text in FILES.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    return site


def test_a_package_brings_all_of_these_with_the_seam_alone(package: Path, tmp_path: Path) -> None:
    """An old config of another tool trains the package's task on two ranks, and is tracked."""
    ours = [
        line
        for text in FILES.values()
        for line in re.findall(r"(?:from|import) samecurve\S*", text)
    ]
    assert set(ours) == {"from samecurve.seam"}
    (tmp_path / "old.yaml").write_text("strange_steps: 5\n")

    def typed(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "samecurve", *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(package)},
            check=False,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    train = ("train", "-f", "old.yaml", "--devices", "cpu:2", "--save-dir", "run")
    typed(*train, "--set", "track.others=[lines]", "--set", "data.count=24")
    tracked = (tmp_path / "run/logs/lines/steps.txt").read_text().splitlines()
    assert [line.split()[0] for line in tracked] == ["1", "2", "3", "4", "5"]
    assert typed("last-loss", "run").strip() == tracked[-1].split()[1]
    assert "lines" not in typed("plan", "-f", "old.yaml")
