"""Was a run's journal, or a checkpoint, changed after it was written?

Each checkpoint carries the hash of all that the journal held when it was saved, and the journal's
`saved` line carries the checkpoint's hash. When a start ends, its last line, `finished` or
`stopped`, has the hash of all lines before it. So each line is covered by what was written later.
This shows changes, not intent: who can write all of the files can write all of the hashes anew.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from samecurve.checkpoint import read_manifest
from samecurve.observe import RunningHash, read_lines
from samecurve.seam import (
    CorruptCheckpointError,
    Run,
    checkpoints,
    counted,
    event_of,
    regular_only,
    verify_checkpoint,
)


class _Point(NamedTuple):
    """A hash of the journal's first bytes, and what holds it."""

    bytes: int
    sha256: str
    holder: str


@dataclass
class JournalCheck:
    """What was compared, and what is wrong."""

    lines: int = 0
    points: int = 0  # hashes of the journal that were compared
    saved: int = 0  # checkpoints that were compared
    unsealed: int = 0  # lines after the last hash, which nothing covers
    faults: list[str] = field(default_factory=list)

    def to_lines(self) -> list[str]:
        if self.faults:
            return [f"FAIL   {fault}" for fault in self.faults]
        if not self.points:
            return ["note   no hash of this journal was kept: an older version has written the run"]
        text = (
            f"PASS   {counted(self.lines, 'line')} of the journal and"
            f" {counted(self.saved, 'checkpoint')} are as they were written"
        )
        if self.unsealed > 1:  # the last line of a start, which has the hash of those before it
            text += f"; the last {self.unsealed} lines are covered by no hash yet"
        return [text]


def check_journal(run: Run) -> JournalCheck:
    """Compare the journal with the hashes of it, and each checkpoint with the journal's line."""
    check, ends = JournalCheck(), [0]
    seals: list[_Point] = []
    saved: dict[int, object] = {}
    with open(run.journal, "rb", opener=regular_only) as file:
        for line in read_lines(file):
            event = event_of(line)
            ends.append(ends[-1] + len(line))
            if event and event.kind in {"finished", "stopped"}:
                name = f"the line `{event.kind}` of step {event.step}"
                seals += filter(None, [_point(event.values.get("journal"), name)])
            elif event and event.kind == "saved":
                saved[event.step] = event.values.get("manifest")
    check.lines = len(ends) - 1
    points = sorted([*seals, *_points_of_checkpoints(run)])
    _compare(run, check, points, ends)
    for path in checkpoints(run.checkpoints):
        _check_checkpoint(check, path.name, saved, path)
    return check


def _point(values: object, holder: str) -> _Point | None:
    if not isinstance(values, dict):
        return None
    size, digest = values.get("bytes"), values.get("sha256")
    if not isinstance(size, int) or not isinstance(digest, str) or size < 0:
        return None
    return _Point(size, digest, holder)


def _points_of_checkpoints(run: Run) -> Iterator[_Point]:
    for path in checkpoints(run.checkpoints):
        try:
            point = _point(read_manifest(path).get("journal"), path.name)
        except CorruptCheckpointError:
            continue  # told where the checkpoints are compared
        if point:
            yield point


def _compare(run: Run, check: JournalCheck, points: list[_Point], ends: list[int]) -> None:
    """Compare up to the first hash that does not hold: all later ones cover the same change."""
    check.points, good = len(points), 0
    running = RunningHash()
    descriptor = regular_only(str(run.journal), os.O_RDONLY)
    try:
        for point in points:
            if running.after(descriptor, point.bytes).sha256 != point.sha256:
                first = sum(end <= good for end in ends)
                last = sum(end < point.bytes for end in ends)
                check.faults.append(
                    f"journal.jsonl was changed: lines {first} to {last} are not those whose hash"
                    f" {point.holder} has"
                )
                return
            good = point.bytes
    finally:
        os.close(descriptor)
    check.unsealed = sum(end > good for end in ends)


def _check_checkpoint(
    check: JournalCheck, name: str, saved: Mapping[int, object], path: Path
) -> None:
    try:
        manifest = verify_checkpoint(path)
    except CorruptCheckpointError as error:
        check.faults.append(f"checkpoint {name} is damaged: {error}")
        return
    expected = saved.get(int(manifest["step"]))
    if expected is None:
        return  # from another run, or written by an older version
    check.saved += 1
    if expected != manifest["hash"]:
        check.faults.append(
            f"checkpoint {name} is not the one that was saved: its hash is {manifest['hash'][:12]},"
            f" and the journal's is {str(expected)[:12]}"
        )
