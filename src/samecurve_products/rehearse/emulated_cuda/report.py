"""What the processes of an emulated run found: races, host reads, host syncs and counts.

Each process appends JSON lines to a file of its own in the directory EMULATED_CUDA_REPORT: a
finding at once (the native part writes it, also where the process dies of it), its counts at its
end. A process that is killed leaves its findings but no counts.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Finding:
    """One fault that the emulator saw.

    kind: race, use_after_free, host_read, late_copy, pinned_source, not_deterministic, device,
        collective, hang.
    here, there: Python lines, innermost first, of this access and of the one it collides with.
    """

    kind: str
    text: str
    here: tuple[str, ...]
    there: tuple[str, ...]
    process: int


@dataclass(frozen=True)
class ProcessReport:
    """What one process found. counts is empty where the process did not come to its end."""

    process: int
    command: tuple[str, ...]
    findings: tuple[Finding, ...]
    counts: dict[str, Any] = field(default_factory=dict)


def read(directory: Path) -> list[ProcessReport]:
    """The reports of all processes, by process id."""
    reports = []
    for file in sorted(directory.glob("*.jsonl")):
        process = int(file.stem)
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        findings = [row for row in rows if row["row"] == "finding"]
        ends = [row for row in rows if row["row"] == "end"]
        reports.append(
            ProcessReport(
                process=process,
                command=tuple(ends[-1]["command"]) if ends else (),
                findings=tuple(_finding(row, process) for row in findings),
                counts=ends[-1]["counts"] if ends else {},
            )
        )
    return reports


def _finding(row: dict[str, Any], process: int) -> Finding:
    here, there = tuple(row["here"]), tuple(row["there"])
    return Finding(row["kind"], row["text"], here, there, process)


def write_end(directory: Path, command: list[str], counts: dict[str, Any]) -> None:
    """Append this process's counts; the native part has written its findings before."""
    row = json.dumps({"row": "end", "command": command, "counts": counts}) + "\n"
    file = os.open(
        directory / f"{os.getpid()}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644
    )
    try:
        os.write(file, row.encode())
    finally:
        os.close(file)
