"""A stop while pictures are encoded, before the first step: at once, and what is encoded stays."""

import json
import os
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("diffusers", reason="pip install -e '.[diffusion]'")

from commands import samecurve, started, until
from samecurve.observe import read_events
from samecurve.run.directory.attempt import STOP_SIGNAL
from samecurve.watch import live_ranks

SIDE, PICTURES = 64, 400  # all of them take some seconds


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, pipelines: Mapping[str, Path]) -> Path:
    home = tmp_path_factory.mktemp("encoding")
    colours = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    (home / "set").mkdir()
    for number in range(PICTURES):
        Image.fromarray(np.roll(colours, number)).save(home / "set" / f"{number:03}.png")
        (home / "set" / f"{number:03}.txt").write_text("noise")
    values = {
        "task": "diffusion",
        "model": {"path": str(pipelines["sd15"]), "adapter": {"rank": 2}},
        "data": {"source": str(home / "set"), "resolution": SIDE, "validation": 0, "prompts": []},
        "batch": {"samples": 1},
        "train": {"steps": 1},
    }
    (home / "config.json").write_text(json.dumps(values))
    return home


def last_rank(run: Path) -> int:
    processes = live_ranks(run / "logs")
    return processes[max(processes)]


def encoded(cache: Path) -> dict[Path, int]:
    """The files that are there, and when they were written."""
    files = (cache / "diffusion").rglob("*.safetensors")
    return {file: file.stat().st_mtime_ns for file in files}


@dataclass(frozen=True)
class Stop:
    """A signal to a run."""

    devices: str
    number: signal.Signals
    of_launcher: bool = True  # else to the last rank alone


@pytest.mark.long
@pytest.mark.parametrize(
    "stop",
    [
        Stop("cpu:2", signal.SIGINT),
        Stop("cpu", signal.SIGTERM),
        Stop("cpu:2", STOP_SIGNAL, of_launcher=False),
    ],
)
def test_a_stop_while_encoding(
    stop: Stop, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command encodes only the rest, and trains."""
    cache, run = tmp_path / "cache", tmp_path / "run"
    monkeypatch.setenv("SAMECURVE_CACHE", str(cache))
    train = ("train", "-f", home / "config.json", "--save-dir", run, "--devices", stop.devices)
    with started(*train, cwd=tmp_path) as process:
        until(lambda: len(encoded(cache)) >= 6, timeout=300)
        os.kill(process.pid if stop.of_launcher else last_rank(run), stop.number)
        shown, _ = process.communicate(timeout=120)
    assert process.returncode == (128 + stop.number if stop.of_launcher else 0), shown
    total, before = PICTURES + 2, encoded(cache)
    there = len(before)
    assert 6 <= there < total - 100
    (line,) = re.findall("^stop   .*$", shown, re.M)
    assert (
        line == f"stop   while files were made, {there} of {total} done; the same command goes on"
    )
    ends = [event for event in read_events(run / "journal.jsonl") if event.kind == "stopped"]
    assert [event.step for event in ends] == [0]
    again = samecurve(*train, cwd=tmp_path, timeout=300)
    after = encoded(cache)
    assert len(after) == total
    assert before.items() <= after.items()
    assert f"{total - there} files made in" in again.stdout
    assert "done   step 1" in again.stdout
