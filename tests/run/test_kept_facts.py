"""The facts of a user's task are kept for the next start of the same command."""

from pathlib import Path

import pytest

from samecurve.core.config.document import Document
from samecurve.core.config.loading import load_document
from samecurve.run.describe import describe
from samecurve.tasks import Tasks

TASK = """\
from pathlib import Path
import numpy as np
from torch import nn
from samecurve import Mean

class Rows:
    def __len__(self):
        return int(Path("rows").read_text())
    def __getitem__(self, ids):
        return {"x": np.ones((len(ids), 1), np.float32)}

class Own:
    def model(self):
        return nn.Linear(1, 1)
    def loss(self, model, batch):
        return Mean(model(batch["x"]).sum(), len(batch["x"]))
    def train_data(self):
        return Rows()
"""


def test_kept_facts_follow_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other data is for the ranks to find, which compare fingerprints; other code is described."""
    monkeypatch.chdir(tmp_path)
    own, rows, kept = Path("own.py"), Path("rows"), tmp_path / "kept"
    own.write_text(TASK)
    config = load_document(
        Document({"task": "own.py:Own", "batch": {"samples": 4}}), Tasks()
    ).config

    def samples() -> list[int]:
        return [describe(config, kept=kept).data.samples, describe(config).data.samples]

    rows.write_text("8")
    assert samples() == [8, 8]
    rows.write_text("9")
    assert samples() == [8, 9]
    own.write_text(f"{TASK}\n# changed\n")
    assert samples() == [9, 9]
