"""The wheel and the sdist: what is in them, and that both install and run in an empty environment.

The versions that CHANGELOG.md, CITATION.cff and the code name are the same.
"""

import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

import samecurve
from distributions import faults_of
from samecurve import checkpoint, observe
from wheel_trial import try_wheel

ROOT = Path(__file__).parents[1]


def build(directory: Path) -> Path:
    """Build both into a directory, as `make dist` does."""
    spec = importlib.util.find_spec("build")
    if spec is None or spec.origin is None:
        pytest.skip("the package build is not installed: pip install build")
    command = [sys.executable, "-m", "build", "--outdir", str(directory), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return directory


@pytest.mark.long
def test_both_have_what_they_should_and_a_fault_is_found(tmp_path: Path) -> None:
    made = build(tmp_path / "dist")
    assert faults_of(made) == []
    (wheel,) = made.glob("*.whl")
    planted = shutil.copytree(made, tmp_path / "planted") / wheel.name
    with zipfile.ZipFile(planted, "a") as archive:
        archive.writestr("samecurve/runs/a/journal.jsonl", "{}")
    (fault,) = faults_of(planted.parent)
    assert "has samecurve/runs/a/journal.jsonl, which does not belong there" in fault


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("form", ["*.whl", "*.tar.gz"])
def test_it_installs_and_runs_in_an_empty_environment(form: str, tmp_path: Path) -> None:
    (distribution,) = build(tmp_path / "dist").glob(form)
    lines = try_wheel(distribution, tmp_path)
    assert f"samecurve, version {samecurve.__version__}" in lines[1]
    assert "all 2 layouts give one device's result" in lines[-1]
    shutil.rmtree(tmp_path / "environment")


def test_versions_are_one() -> None:
    page = (ROOT / "CHANGELOG.md").read_text()
    shown = dict(re.findall(r"^\| ([^|,:]+?)(?:[,:][^|]*)? \| ([\d.]+) \|", page, re.MULTILINE))
    assert shown == {
        "the program": samecurve.__version__,
        "the config": "1",
        "the journal": str(observe.VERSION),
        "the checkpoint": str(checkpoint.VERSION),
        "`plan.json`": "1",
    }
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == samecurve.__version__
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## ([\d.]+)", changes, re.MULTILINE)[0] == samecurve.__version__
    assert citation["cff-version"] == "1.2.0"
    assert {"authors", "message", "title", "license"} <= set(citation)
