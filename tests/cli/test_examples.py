"""`samecurve examples`: the files that come with the program; none is overwritten."""

import subprocess
from pathlib import Path

import pytest

from commands import refused, samecurve
from samecurve.core.config.document import read_document
from samecurve.core.system.shipped import shipped_files

ROOT = Path(__file__).parents[2]


def test_the_files_are_written_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def error_of(*words: str) -> str:
        return refused(monkeypatch, capsys, *words, cwd=tmp_path)

    error = error_of("plan", "-f", "models/tiny.yaml")
    assert "remedy: `samecurve examples` writes models/ and examples/" in error
    first = samecurve("examples", cwd=tmp_path).stdout.splitlines()
    assert first == [
        f"wrote  {len(shipped_files())} files: models/, examples/, docs/config.schema.json",
        "next   samecurve train -f models/tiny.yaml",
    ]
    again = samecurve("examples", cwd=tmp_path).stdout
    assert again.startswith("kept   models/, examples/, docs/config.schema.json: here already")
    (tmp_path / "models/tiny.yaml").unlink()
    (tmp_path / "examples/vae.yaml").write_text("task: mine.py:Mine\n")
    error = error_of("examples")
    assert "examples/vae.yaml is there and differs" in error
    assert not (tmp_path / "models/tiny.yaml").exists()
    (tmp_path / "file").touch()
    assert "remedy: name a directory that you may write" in error_of("examples", "file")


def test_they_are_the_repository_s_files_and_a_line_of_them_is_planned(tmp_path: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "models", "examples", "docs/config.schema.json"],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    if listed.returncode == 0:  # else: an unpacked sdist
        assert sorted(map(str, shipped_files())) == sorted(listed.stdout.split())
    said = samecurve("examples", "a b", cwd=tmp_path).stdout
    assert said.endswith("next   cd 'a b' && samecurve train -f models/tiny.yaml\n")
    plan = samecurve(
        "plan", "-f", "examples/my_task.yaml", "--devices", "cpu:2", cwd=tmp_path / "a b"
    ).stdout
    assert "world 2" in plan


def test_the_pages_name_every_config_and_count_them() -> None:
    """The README counts those that tests/emulated_cuda/test_shipped_on_gpus.py trains."""
    page = (ROOT / "docs/examples.md").read_text()
    models, examples = (sorted((ROOT / name).glob("*.yaml")) for name in ("models", "examples"))
    assert [file.name for file in models if f"{file.name}`" not in page] == []
    of_torch = [
        file for file in [*models, *examples] if read_document(file).value.get("engine") != "jax"
    ]
    readme = (ROOT / "README.md").read_text()
    assert f"The {len(of_torch)} example configs for PyTorch" in readme
