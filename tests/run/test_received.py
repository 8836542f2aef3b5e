"""A run that was received: nothing is read or written through what is no file of its own."""

import os
import shutil
from pathlib import Path

import pytest

import samecurve as library
from commands import refused, samecurve, write_config
from samecurve.errors import UserError
from samecurve.tasks.adapter import torch_adapter


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A directory with a config, and a run of it."""
    home = tmp_path_factory.mktemp("received")
    config = write_config(home, corpus, steps=4, save=2)
    samecurve("train", "-f", config, "--devices", "cpu", "--save-dir", "run", cwd=home)
    return home


@pytest.fixture
def received(trained: Path, tmp_path: Path) -> Path:
    """A copy of it, to be tampered with."""
    return Path(shutil.copytree(trained, tmp_path / "here", symlinks=True))


@pytest.mark.parametrize(
    "name", ["lock", "journal.jsonl", "plan.json", "config.yaml", "logs/rank-0.log"]
)
@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_nothing_is_written_or_read_through_a_link_or_a_pipe(
    name: str,
    kind: str,
    received: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, target = received / "run" / name, received / "target"
    target.write_text("precious")
    path.unlink(missing_ok=True)
    if kind == "link":
        path.symlink_to(target)
    else:
        os.mkfifo(path)
    for arguments in (
        ("train", "-f", "tiny.yaml", "--save-dir", "run", "--devices", "cpu"),
        ("compare-runs", "run", "run"),
        ("eval", "run"),
        ("sample", "run"),
        ("report", "run"),
    ):
        says = refused(monkeypatch, capsys, *arguments, cwd=received)
        assert f"run/{name} is {'a link' if kind == 'link' else 'no ordinary file'}" in says
    assert target.read_text() == "precious"


def test_compared_runs_are_those_that_were_saved(
    received: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A directory that only begins like a checkpoint is none; a changed file is no equal one."""
    shutil.copytree(received / "run", received / "other")
    (received / "run/checkpoints/step-abc").mkdir()
    saved = received / "other/checkpoints/step-00000004/rank-0-of-1.safetensors"
    content = bytearray(saved.read_bytes())
    content[-1] ^= 1
    saved.write_bytes(content)
    says = refused(monkeypatch, capsys, "compare-runs", "run", "other", cwd=received)
    assert "other/checkpoints/step-00000004" in says
    assert "does not match its hash" in says


def test_a_config_of_another_width_takes_no_memory(
    unbroken_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Weights of 32 columns, and a config that says a million."""
    run = tmp_path / "run"
    shutil.copytree(unbroken_run, run)
    config = (run / "config.yaml").read_text()
    assert "hidden_size: 32" in config
    (run / "config.yaml").write_text(config.replace("hidden_size: 32", "hidden_size: 1000000"))
    monkeypatch.setattr(
        torch_adapter, "cast_weights", lambda *_: pytest.fail("the model was built with values")
    )
    with pytest.raises(UserError, match=r"embed_tokens.weight \[256, 32\], here \[256, 1000000\]"):
        library.load(run)
    said = refused(monkeypatch, capsys, "eval", run, cwd=tmp_path)
    assert "is of another model than step-00000060: " in said
    assert "[256, 32], here [256, 1000000] and 20 more" in said
