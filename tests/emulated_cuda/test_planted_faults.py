"""Faults that emulated GPUs must find and name with their lines; without them nothing is found.

By hand, for the table of what was said: `python tests/emulated_cuda/test_planted_faults.py`.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from emulated import only_emulated
from planted import Fault
from planted_runs import FAULTS

from samecurve_products.rehearse.emulated_cuda.machine import Emulation

pytestmark = only_emulated
HERE = Path(__file__).parent
MEMORY = 1 << 30  # bytes of a GPU: a leak soon fills it
SHARP = [name for name, fault in FAULTS.items() if fault.sharp]
OTHERS = [name for name in FAULTS if name not in SHARP]
Answers = Mapping[str, Mapping[str, Any]]


def answers_of(names: Sequence[str], home: Path) -> Answers:
    """What was seen of these faults, and of their runs without them, by warm processes."""
    reports, answers = home / "reports", home / "answers.json"
    reports.mkdir()
    emulated = Emulation(devices=2, memory=MEMORY, report=reports).environment()
    paths = os.pathsep.join([emulated["PYTHONPATH"], str(HERE)])
    done = subprocess.run(
        [sys.executable, "-m", "planted_runs", answers, *names],
        cwd=home,
        env={**os.environ, **emulated, "PYTHONPATH": paths, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert not done.returncode, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    found: Answers = json.loads(answers.read_text())
    return found


def named(fault: Fault, answer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The findings of the fault's kind that name its line."""
    return [
        finding
        for finding in answer["findings"]
        if finding["kind"] == fault.kind
        and any(fault.place in f"{finding[key]} " for key in ("place", "inside", "there", "text"))
    ]


def check(names: Sequence[str], answers: Answers) -> None:
    for name in names:
        fault = FAULTS[name]
        control, _ = fault.control
        assert answers[control] == {"findings": [], "error": ""}, control
        assert named(fault, answers[name]), (name, fault.place, answers[name])


def test_sharp_faults_are_named_with_their_lines(tmp_path: Path) -> None:
    check(SHARP, answers_of(SHARP, tmp_path))


@pytest.mark.long  # forty runs, some of which hang for seconds until a watchdog ends them
def test_all_other_faults_are_named_with_their_lines(tmp_path: Path) -> None:
    check(OTHERS, answers_of(OTHERS, tmp_path))


def table(answers: Answers) -> str:
    """The faults, and what was said of each, as Markdown."""
    rows = ["| fault | run | kind | line | what was said |", "|---|---|---|---|---|"]
    for name, fault in FAULTS.items():
        said = named(fault, answers[name]) if name in answers else []
        first = said[0] if said else {"place": "", "text": "NOT NAMED"}
        row = name, fault.run, fault.kind, fault.place.strip(), f"{first['place']}: {first['text']}"
        rows.append(f"| {' | '.join(row)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        print(table(answers_of(sys.argv[1:] or [*FAULTS], Path(directory))))
