"""The task that `samecurve init --task FILE.py` writes passes its own test; the start scripts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from commands import samecurve
from samecurve_products.init.answers import Answers
from samecurve_products.init.interview import interview

SCRIPT = Path(__file__).parents[2] / "scripts/start-multi-gpu.sh"


def make(home: Path, monkeypatch: pytest.MonkeyPatch, **flags: str) -> None:
    monkeypatch.chdir(home)
    # other tests of this process leave the directory of their task there
    monkeypatch.setattr(sys, "path", [one for one in sys.path if not one.endswith("examples")])
    interview(
        Answers({f"--{name}": value for name, value in flags.items()}, asks=False), schema=True
    )


@pytest.mark.long
@pytest.mark.parametrize("folder", ["", "tasks/mine"])
def test_its_own_test_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    make(tmp_path, monkeypatch, task=f"{folder}/rings.py".lstrip("/"), devices="cpu:2", batch="33")
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error"]
    tests = [path.name for path in (tmp_path / folder).glob("test_*.py")]
    assert tests == ["test_rings.py"]
    done = subprocess.run(
        [*line, *tests], cwd=tmp_path / folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


@pytest.mark.long
def test_it_trains_as_written_and_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, monkeypatch, task="rings.py", devices="cpu:2")
    shown = samecurve("train", "-f", "rings.yaml", "--max-steps", "60", cwd=tmp_path).stdout
    assert "Running on 2 devices (CPU ranks)" in shown
    accuracy = float(shown.partition("accuracy ")[2].split()[0])
    assert accuracy > 0.8
    verified = samecurve("verify", "-f", "rings.yaml", "--layouts", "fsdp:3", cwd=tmp_path).stdout
    assert "PASS   all 1 layouts give one device's result" in verified


def start(home: Path, python: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHON"}
    environment |= {"PYTHON": python} if python else {}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    return subprocess.run(
        ["sh", str(SCRIPT), *arguments],
        cwd=home,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_start_script_finds_the_environment_or_says_what_is_missing(tmp_path: Path) -> None:
    done = start(tmp_path, "", "--task", "one.py", "--no-schema")
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"one.py", "one.yaml", "test_one.py"}
    done = start(tmp_path, "no-such-python", "--yes")
    assert done.returncode == 2
    assert "error: no-such-python has no Samecurve" in done.stderr
    assert "remedy: `make demo`" in done.stderr
    assert "there is no terminal to ask on" in start(tmp_path, sys.executable).stderr


def test_the_batch_file_is_one_and_starts_the_script_in_wsl() -> None:
    text = SCRIPT.with_suffix(".bat").read_bytes()
    assert text.count(b"\r\n") == text.count(b"\n")
    assert b'wsl --cd "%~dp0.." --exec sh scripts/start-multi-gpu.sh %*\r\n' in text
    assert b"wsl --install" in text
