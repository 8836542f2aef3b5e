"""A run that is trained but was killed before its end is ended by the same command."""

import json
from pathlib import Path

import pytest

from commands import samecurve
from samecurve.observe import read_events

TASK = """\
import numpy as np, torch
from samecurve import Mean

class Rows:
    def __len__(self):
        return 16
    def __getitem__(self, ids):
        return {"x": np.asarray(ids, dtype="float32")[:, None] / 16}

class Task:
    def __init__(self, model, data): ...
    def model(self):
        return torch.nn.Linear(1, 1)
    def train_data(self):
        return Rows()
    def eval_data(self):
        return Rows()
    def test_data(self):
        return Rows()
    def loss(self, model, batch):
        return Mean(model(batch["x"]).square().sum(), len(batch["x"]))
"""


def cut_before(run: Path, kind: str) -> None:
    """Leave the run as a kill before its journal's line of this kind leaves it."""
    (run / "results.json").unlink()
    journal = run / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    end = next(number for number, line in enumerate(lines) if f'"kind": "{kind}"' in line)
    journal.write_text("".join(lines[:end]))


@pytest.mark.parametrize("early", [False, pytest.param(True, marks=pytest.mark.long)])
def test_the_same_command_ends_what_was_trained(*, early: bool, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TASK)
    stop = "  early_stop: {patience: 1, min_delta: 9}\n  eval_every: 1\n" if early else ""
    (tmp_path / "c.yaml").write_text(
        f"task: mine.py:Task\nbatch: {{samples: 8}}\ntrain:\n  steps: 4\n{stop}"
    )
    train = ["train", "-f", "c.yaml", "--devices", "cpu"]
    samecurve(*train, cwd=tmp_path)
    [run] = (tmp_path / "runs").iterdir()
    whole = json.loads((run / "results.json").read_text())
    ends = {event.kind: event.values for event in read_events(run / "journal.jsonl")}

    for kind in ("tested", "finished") if early else ("tested",):
        cut_before(run, kind)
        samecurve(*train, cwd=tmp_path)
        assert [path.name for path in (tmp_path / "runs").iterdir()] == [run.name]
        events = read_events(run / "journal.jsonl")
        assert [event.kind for event in events][-2:] == ["tested", "finished"]
        assert events[-1].values.get("early_stop") == ends["finished"].get("early_stop")
        results = json.loads((run / "results.json").read_text())
        assert results["test"] == {**whole["test"]}
        assert results["training"]["steps"] == whole["training"]["steps"]

    (run / "results.json").unlink()
    said = samecurve(*train, "--save-dir", run, cwd=tmp_path).stdout
    assert "stopped early" in said if early else "trained before" in said
    assert json.loads((run / "results.json").read_text())["test"] == whole["test"]
