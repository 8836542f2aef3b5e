"""`samecurve eval`: a checkpoint has one set of metrics, on any devices."""

import json
import shutil
from pathlib import Path

import pytest

from commands import refused, samecurve, write_config
from samecurve.checkpoint.store import checkpoints, prune
from samecurve.core.config import MetricGoal
from samecurve.observe import read_events
from samecurve.run.weights.opened_checkpoint import held


def test_what_is_evaluated_stays_where_it_is_while_a_live_run_saves(
    unbroken_run: Path, tmp_path: Path
) -> None:
    """Until then: those that evaluate start long after it was chosen."""
    shutil.copytree(unbroken_run, tmp_path / "run")
    home = tmp_path / "run/checkpoints"
    oldest = home / "step-00000020"
    with held(oldest) as checkpoint:
        assert checkpoint.path == oldest
        prune(home, 1, MetricGoal())
        assert oldest in checkpoints(home)
    prune(home, 1, MetricGoal())
    assert oldest not in checkpoints(home)


def test_a_checkpoint_has_one_set_of_metrics(
    tmp_path: Path,
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = write_config(tmp_path, corpus, steps=8, save=4)
    samecurve("train", "-f", config, "--save-dir", "run", cwd=tmp_path)
    own = [
        event.values
        for event in read_events(tmp_path / "run/journal.jsonl")
        if event.kind == "evaluated"
    ]
    files = sorted(tmp_path.rglob("*"))
    last = json.loads(
        samecurve(
            "eval", "run", "--devices", "cpu:3", "--strategy", "fsdp", "--json", cwd=tmp_path
        ).stdout
    )
    assert {name: last[name] for name in ("step", "samples")} == {"step": 8, "samples": 8}
    assert [last[name] for name in ("loss", "perplexity", "accuracy")] == pytest.approx(
        [own[-1][name] for name in ("loss", "perplexity", "accuracy")], rel=1e-12
    )
    shown = samecurve("eval", "run/checkpoints/step-00000004", "-d", config, cwd=tmp_path).stdout
    assert shown.startswith("eval   step 4  loss ")
    assert "1 x cpu single" in shown
    assert sorted(tmp_path.rglob("*")) == files
    for arguments, said in (
        (("run", "--devices", "cpu:2", "--gpus", "0"), "both set devices.use"),
        (("none",), "neither a run directory nor a checkpoint"),
        (("run", "--set", "data.eval_samples=0"), "--on train evaluates on what it was trained on"),
        (("run", "--on", "test"), "run has no test data"),
        (("run", "--gpus", "0"), "no GPU"),
    ):
        assert said in refused(monkeypatch, capsys, "eval", *arguments, cwd=tmp_path)
