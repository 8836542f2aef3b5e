"""What the processes of an emulated run found: races, host reads, host syncs and counts.

Each process appends JSON lines to a file of its own in the directory EMULATED_CUDA_REPORT, in the
order in which things happen: a row `finding` at once (the native part writes it, also where the
process dies of it), a row `step` after each training step (step_watch.py), a row `end` at its end.
A process that is killed leaves no `end`, and perhaps half a line.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One fault that the emulator saw.

    kind: race, use_after_free, host_read, late_copy, pinned_source, not_deterministic, device,
        collective, hang.
    here, there: Python lines, innermost first, of this access and of the one it collides with.
    step: the training step in which it was seen first, from 1.
    """

    kind: str
    text: str
    here: tuple[str, ...]
    there: tuple[str, ...]
    step: int = 1


@dataclass(frozen=True, kw_only=True)
class ProcessReport:
    """What one process found.

    steps: the row of each training step, by its number from 1.
    command, counts: empty where the process did not come to its end.
    """

    process: int
    findings: tuple[Finding, ...] = ()
    steps: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    counts: Mapping[str, Any] = field(default_factory=dict)


def read(directory: Path) -> list[ProcessReport]:
    """The reports of all processes, by process id."""
    return [_read(file) for file in sorted(directory.glob("*.jsonl"))]


def _read(file: Path) -> ProcessReport:
    findings: list[Finding] = []
    steps: dict[int, Mapping[str, Any]] = {}
    end: Mapping[str, Any] = {"command": (), "counts": {}}
    for row in _rows(file):
        if row["row"] == "step":
            steps[row["step"]] = row
        elif row["row"] == "finding":
            here, there = tuple(row["here"]), tuple(row["there"])
            step = len(steps) + 1
            found = Finding(kind=row["kind"], text=row["text"], here=here, there=there, step=step)
            findings.append(found)
        elif row["row"] == "end":
            end = row
    return ProcessReport(
        process=int(file.stem),
        findings=tuple(findings),
        steps=steps,
        command=tuple(end["command"]),
        counts=end["counts"],
    )


def _rows(file: Path) -> list[Mapping[str, Any]]:
    """The lines of a file. A line that the process's death has cut short is left out."""
    rows = []
    for text in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            rows.append(json.loads(text))
        except ValueError:
            continue
    return rows


def append(directory: Path | str, row: Mapping[str, Any]) -> None:
    """Add a row to this process's file."""
    file = os.open(
        os.path.join(directory, f"{os.getpid()}.jsonl"),
        os.O_WRONLY | os.O_APPEND | os.O_CREAT,
        0o644,
    )
    try:
        os.write(file, (json.dumps(row) + "\n").encode())
    finally:
        os.close(file)
