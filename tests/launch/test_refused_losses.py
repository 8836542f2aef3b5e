"""A loss that does not add up, from the command line: refused before the first step, once and not
once per rank, with nothing left; trained with a line where nothing is split or it is allowed.
"""

import json
from pathlib import Path

import pytest

from commands import refused, samecurve
from samecurve.observe import read_events
from samecurve.run.directory import Run

FILE = Path(__file__).parents[1] / "torch_engine" / "uneven_losses.py"


def write(home: Path, kind: str) -> Path:
    path = home / "own.yaml"
    values = {
        "task": f"{FILE}:Uneven",
        "data": {"loss": kind},
        "batch": {"samples": 10},
        "train": {"steps": 2},
    }
    path.write_text(json.dumps(values))
    return path


def test_two_ranks_refuse_once_and_leave_no_run(tmp_path: Path) -> None:
    config = write(tmp_path, "contrastive")
    done = samecurve(
        "train", "-f", config, "--devices", "cpu:2", "--save-dir", "run", cwd=tmp_path, code=2
    )
    assert done.stderr.count("Tensor.matmul compares each sample with each other") == 1
    assert done.stderr.count("error:") == 1
    assert "rank" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_verify_looks_first_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where its reference, one device, would train it."""
    config = write(tmp_path, "contrastive")
    said = refused(monkeypatch, capsys, "verify", "-f", config, "--layouts", "dp:2", cwd=tmp_path)
    assert "Tensor.matmul compares each sample with each other" in said


@pytest.mark.long
def test_one_device_trains_it_and_says_so_in_the_journal(tmp_path: Path) -> None:
    config = write(tmp_path, "contrastive")
    arguments = ("train", "-f", str(config), "--save-dir", "run")
    samecurve(*arguments, "--devices", "cpu", cwd=tmp_path)
    (line,) = _warned(tmp_path / "run")
    assert line.endswith("will not carry over to several")
    allow = ("--set", "train.allow_coupled=true", "--save-dir", "allowed")
    samecurve(*arguments, "--devices", "cpu:2", "--strategy", "dp", *allow, cwd=tmp_path)
    (line,) = _warned(tmp_path / "allowed")
    assert line.endswith("Trained all the same (train.allow_coupled)")
    plan = Run(tmp_path / "allowed").read_plan()
    assert any(line.startswith("train.allow_coupled: ") for line in plan.warnings)


def _warned(run: Path) -> list[str]:
    events = read_events(run / "journal.jsonl")
    return [event.values["text"] for event in events if event.kind == "warned"]
