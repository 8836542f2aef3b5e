"""Faults that emulated GPUs must find and name with their lines; without them nothing is found.

By hand, for the table of what was said: `python tests/emulated_cuda/test_planted_faults.py`.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from emulated import only_emulated

from samecurve_products.rehearse.emulated_cuda.machine import Emulation

pytestmark = only_emulated
HERE = Path(__file__).parent
MEMORY = 1 << 30  # bytes of a GPU: a leak soon fills it
KEYS = ("place", "inside", "there", "text")  # of a finding, in which a line may stand
Answer = Mapping[str, Any]  # as planted_runs.Answer has it


def answers_of(which: str, home: Path) -> Mapping[str, Answer]:
    """What was seen of faults, and of their runs without them, by warm processes."""
    reports, answers = home / "reports", home / "answers.json"
    reports.mkdir()
    emulated = Emulation(devices=2, memory=MEMORY, report=reports).environment()
    paths = os.pathsep.join([emulated["PYTHONPATH"], str(HERE)])
    exact = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # as a process needs it that trains exactly
    done = subprocess.run(
        [sys.executable, "-m", "planted_runs", answers, which],
        cwd=home,
        env={**os.environ, **emulated, **exact, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert not done.returncode, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    seen: Mapping[str, Answer] = json.loads(answers.read_text())
    return seen


def named(answer: Answer) -> list[Mapping[str, Any]]:
    """The findings of the fault's kind that name its line."""
    return [
        finding
        for finding in answer["findings"]
        if finding["kind"] == answer["kind"]
        and any(answer["place"] in f"{finding[key]} " for key in KEYS)
    ]


def check(answers: Mapping[str, Answer], *, faults: int) -> None:
    planted = {name: answer for name, answer in answers.items() if answer["kind"]}
    assert len(planted) == faults
    for name, answer in planted.items():
        control = answers[answer["control"]]
        assert (control["findings"], control["error"]) == ([], ""), answer["control"]
        assert named(answer), (name, answer)


def test_sharp_faults_are_named_with_their_lines(tmp_path: Path) -> None:
    check(answers_of("sharp", tmp_path), faults=8)


@pytest.mark.long  # thirty-five runs, some of which hang for seconds until a watchdog ends them
def test_all_other_faults_are_named_with_their_lines(tmp_path: Path) -> None:
    check(answers_of("other", tmp_path), faults=29)


def table(answers: Mapping[str, Answer]) -> str:
    """The faults, and what was said of each, as Markdown."""
    rows = ["| fault | planted in | kind | line | what was said |", "|---|---|---|---|---|"]
    for name, answer in answers.items():
        if not answer["kind"]:
            continue
        said = named(answer) or [{"place": "", "text": "NOT NAMED", "there": ""}]
        words = f"{said[0]['place']}: {said[0]['text']}"
        if said[0]["there"]:
            words += f" (other line: {said[0]['there']})"
        words = words.replace(f"{HERE}/", "").replace("\n", " ")
        row = name, answer["run"], answer["kind"], answer["place"].strip(), words
        rows.append(f"| {' | '.join(row)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        print(table(answers_of(sys.argv[1] if sys.argv[1:] else "all", Path(directory))))
