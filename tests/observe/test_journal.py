"""A journal holds whole lines only, and what a resume made void is not read again."""

import threading
import time
from pathlib import Path

from samecurve.core.events import Event
from samecurve.observe.heartbeat import Heartbeat, read_heartbeat
from samecurve.observe.journal import Journal, append_event, follow, read_events


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


def test_a_reader_follows_whole_lines_only(tmp_path: Path) -> None:
    path, stop = tmp_path / "journal.jsonl", threading.Event()
    append_event(path, Event("started", 0))
    events: list[Event] = []
    reader = threading.Thread(target=lambda: events.extend(follow(path, stop, pause=0.01)))
    reader.start()
    with open(path, "ab", buffering=0) as file:
        line = Event("step", 1, {"loss": 2.5}).line().encode()
        file.write(line[:10])
        time.sleep(0.05)
        file.write(line[10:])
    stop.set()
    reader.join()
    assert [(e.kind, e.step) for e in events] == [("started", 0), ("step", 1)]


def test_a_heartbeat_is_read_from_outside(tmp_path: Path) -> None:
    assert read_heartbeat(tmp_path / "heartbeat-0") is None
    heartbeat = Heartbeat(tmp_path / "heartbeat-0")
    heartbeat(12, "save")
    assert read_heartbeat(tmp_path / "heartbeat-0") == (12, "save")
