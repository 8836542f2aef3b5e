"""The best checkpoint of a run, chosen by `best`; and a run as the base of an adapter."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import samecurve as library
from checkpoint_files import save
from commands import refused, samecurve
from samecurve.checkpoint import MANIFEST, hash_of
from samecurve.checkpoint.format import load
from samecurve.checkpoint.store import checkpoints
from samecurve.errors import UserError
from samecurve.run.directory import Run
from samecurve.run.resume import Origin
from samecurve.run.weights import base_files
from samecurve.run.weights.base_files import choose_base
from samecurve.run.weights.opened_checkpoint import best_checkpoint


def with_best_at_20(run: Path, to: Path) -> Path:
    """A copy of a run, of which only the checkpoints of steps 20 and 40 are left, 20 the better."""
    shutil.copytree(run, to)
    paths = checkpoints(to / "checkpoints")

    for path in paths:
        manifest = json.loads((path / MANIFEST).read_text())
        manifest["loop"]["metrics"]["loss"] = 2.0 if path.name.endswith("20") else 3.0
        (path / MANIFEST).write_text(json.dumps({**manifest, "hash": hash_of(manifest)}))
    return to


def test_the_best_checkpoint_is_used_where_it_is_asked_for(
    unbroken_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = with_best_at_20(unbroken_run, tmp_path / "run")
    best = run / "checkpoints/step-00000020"
    assert best_checkpoint(run) == best
    weights = dict(library.load(run, best=True).named_parameters())
    arrays = load(best).arrays
    for name, weight in weights.items():
        np.testing.assert_array_equal(weight.detach().numpy(), arrays[f"model/{name}"])
    assert (
        "export step 20" in samecurve("export", "run", "--best", "--to", "x", cwd=tmp_path).stdout
    )
    assert "eval   step 20" in samecurve("eval", "run", "--best", cwd=tmp_path).stdout
    said = refused(monkeypatch, capsys, "eval", best, "--best", cwd=tmp_path)
    assert "is no run directory, whose best checkpoint could be chosen" in said
    for file in best.glob("*.safetensors"):
        file.write_bytes(b"damaged")
    said = refused(monkeypatch, capsys, "export", "run", "--best", "--to", "y", cwd=tmp_path)
    assert "checkpoint step-00000020, the best of run, is damaged: " in said
    assert "put a copy of it in its place, in run/checkpoints; or name another" in said
    shutil.rmtree(best)
    assert best_checkpoint(run).name == "step-00000040"


def test_a_run_without_evaluations_has_no_best(unbroken_run: Path, tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.checkpoints.mkdir(parents=True)
    save(run.checkpoints, 2)
    shutil.copy(unbroken_run / "plan.json", run.plan)
    with pytest.raises(UserError, match=r"none of the checkpoints of .* was evaluated at its own"):
        best_checkpoint(run.home)


def test_a_run_is_the_base_of_an_adapter_as_an_export_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its newest checkpoint is, and stays it when the run goes on."""
    run = Run(tmp_path / "run")
    run.checkpoints.mkdir(parents=True)
    save(run.checkpoints, 2)
    run.plan.write_text("{}")
    run.config.write_text("{}")
    read: list[Path] = []

    def read_weights(path: Path, *_: Any) -> Any:
        read.append(path)
        return SimpleNamespace(notes=())

    monkeypatch.setattr(base_files, "read_initial_weights", read_weights)
    config, facts = SimpleNamespace(task="language"), SimpleNamespace()
    base = choose_base(Origin(), run.home, config, facts)  # type: ignore[arg-type]
    assert base is not None
    assert base.path == str(run.checkpoints / "step-00000002")
    assert [Path(name).suffix for name in base.files] == [".safetensors"]
    save(run.checkpoints, 4)
    later = Run(tmp_path / "later")
    later.home.mkdir()
    later.base.write_text(json.dumps(base.to_json()))
    assert choose_base(Origin(later), run.home, config, facts) == base  # type: ignore[arg-type]
    assert {path.name for path in read} == {"step-00000002"}
