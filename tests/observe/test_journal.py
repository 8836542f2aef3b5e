"""A journal holds whole lines only, and what a resume made void is not read again."""

import threading
import time
from pathlib import Path

import pytest

from commands import until
from samecurve.core.events import Beat, Event
from samecurve.errors import RunError
from samecurve.observe import (
    Heartbeat,
    Journal,
    append_event,
    follow,
    line_of,
    read_beat,
    read_events,
)


def test_a_torn_last_line_is_cut_and_resumed_steps_are_void(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    for step in (1, 2, 3):
        journal.record(Event("step", step, {"loss": 1 / 3}))
    journal.close()
    with open(path, "ab") as file:
        file.write(b'{"time": 1, "step": 4, "ki')
    journal = Journal(path)
    journal.record(Event("resumed", 1))
    journal.record(Event("step", 2, {"loss": 0.5}))
    journal.close()
    assert [(e.kind, e.step, e.values.get("loss")) for e in read_events(path)] == [
        ("step", 1, 1 / 3),
        ("resumed", 1, None),
        ("step", 2, 0.5),
    ]


def test_steps_reach_the_file_within_half_a_second_and_other_kinds_at_once(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.record(Event("step", 1))
    assert path.read_text() == ""
    journal.record(Event("evaluated", 1))
    assert path.read_text().count("\n") == 2
    journal.record(Event("step", 2))
    deadline = time.monotonic() + 5
    while path.read_text().count("\n") < 3:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    journal.close()


@pytest.mark.parametrize("others_write", [False, True])
def test_a_journal_that_is_removed_is_written_anew_and_that_is_said(
    *, others_write: bool, tmp_path: Path
) -> None:
    """At once, without a line to write; sensors may have begun another file of its name."""
    path, stop = tmp_path / "journal.jsonl", threading.Event()
    journal = Journal(path)
    journal.record(Event("planned", 0))
    journal.record(Event("saved", 7))
    shown: list[Event] = []
    reader = threading.Thread(target=lambda: shown.extend(follow(path, stop, pause=0.01)))
    reader.start()
    until(lambda: len(shown) == 2, timeout=5)
    path.unlink()
    if others_write:
        append_event(path, Event("sensors", 8))
    written = ["planned", "saved", *(["sensors"] if others_write else []), "warned"]
    until(lambda: path.exists() and len(read_events(path)) == len(written), timeout=5)
    journal.record(Event("step", 9))
    journal.close()
    stop.set()
    reader.join()
    assert [event.kind for event in read_events(path)] == [*written, "step"]
    assert [event.kind for event in shown] == [*written, "step"]
    (said,) = [event.values["text"] for event in shown if event.kind == "warned"]
    assert said == "journal.jsonl was removed while the run wrote it: it has been written anew"
    assert [path.name for path in tmp_path.iterdir()] == ["journal.jsonl"]


def test_a_journal_that_an_editor_has_written_is_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.record(Event("planned", 0))
    journal.record(Event("saved", 7))
    copy = tmp_path / "copy"
    copy.write_text(path.read_text().splitlines(keepends=True)[0])
    copy.replace(path)
    journal.record(Event("step", 9))
    journal.close()
    kinds = [event.kind for event in read_events(path)]
    assert kinds == ["planned", "warned", "step"]


def test_a_run_directory_that_is_gone_ends_the_run_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    journal = Journal(tmp_path / "run/journal.jsonl")
    journal.record(Event("planned", 0))
    (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.raises(RunError, match=f"{tmp_path}/run is missing: removed or renamed"):
        journal.record(Event("saved", 7))
    with pytest.raises(RunError, match="is missing"):
        journal.close()


def test_a_reader_follows_whole_lines_only(tmp_path: Path) -> None:
    path, stop = tmp_path / "journal.jsonl", threading.Event()
    append_event(path, Event("started", 0))
    events: list[Event] = []
    reader = threading.Thread(target=lambda: events.extend(follow(path, stop, pause=0.01)))
    reader.start()
    with open(path, "ab", buffering=0) as file:
        line = line_of(Event("step", 1, {"loss": 2.5})).encode()
        file.write(line[:10])
        time.sleep(0.05)
        file.write(line[10:])
    stop.set()
    reader.join()
    assert [(e.kind, e.step) for e in events] == [("started", 0), ("step", 1)]


def test_a_heartbeat_is_read_from_outside(tmp_path: Path) -> None:
    assert read_beat(tmp_path / "heartbeat-0") is None
    heartbeat = Heartbeat(tmp_path / "heartbeat-0")
    heartbeat(12, "save")
    assert read_beat(tmp_path / "heartbeat-0") == Beat(12, "save", beats=1)
