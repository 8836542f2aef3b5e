"""`make` names the Python that it needs before it makes anything, and leaves nothing behind."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# runs code as a Python of this version would; makes half a virtual environment, as one that fails
OLDER = """#!/bin/sh
[ "$1" = -c ] || { mkdir -p .venv/bin && : > .venv/half; exit 1; }
exec %s -c "import sys; code = sys.argv.pop(1); sys.version_info = %s; exec(code)" "$2" "$3"
"""


def script(path: Path, version: tuple[int, int]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(OLDER % (sys.executable, version))
    path.chmod(0o755)
    return path


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def make(tree: Path, python: Path | str) -> str:
    command = ["make", "demo", f"PYTHON={python}"]
    done = subprocess.run(
        command, cwd=tree, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    return done.stderr


def test_an_older_python_is_refused_and_leaves_nothing(tree: Path) -> None:
    python = script(tree / "bin/python3.10", (3, 10))
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    said = make(tree, python)
    assert f"error: {python} is Python 3.10; Samecurve needs {needs[2:]} or newer" in said
    assert "remedy: install Python 3.11 or newer; make demo PYTHON=python3.11" in said
    assert "error: there is no python3.x" in make(tree, "python3.x")
    assert not (tree / ".venv").exists()


def test_an_environment_that_is_older_or_half_made_does_not_stay(tree: Path) -> None:
    make(tree, script(tree / "bin/python3.11", (3, 11)))
    assert not (tree / ".venv").exists()
    script(tree / ".venv/bin/python", (3, 10))
    said = make(tree, "python3")
    assert "error: .venv/bin/python is Python 3.10; Samecurve needs 3.11 or newer" in said
    assert "remedy: rm -rf .venv; make demo PYTHON=python3.11" in said
