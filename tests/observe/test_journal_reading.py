"""What a journal that somebody damaged may not do: hold its readers up."""

import io
import time
from pathlib import Path

from samecurve.core.events import Event
from samecurve.observe import append_event, read_events


def test_a_hole_of_twenty_gigabytes_is_passed_over(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    append_event(journal, Event("step", 1, {"loss": 1.0}))
    with open(journal, "rb+") as file:
        file.truncate(10 << 30)
        file.seek(0, io.SEEK_END)
        file.write(b"\n")
    append_event(journal, Event("step", 2, {"loss": 2.0}))
    with open(journal, "rb+") as file:
        file.truncate(20 << 30)
    began = time.process_time()
    assert [event.step for event in read_events(journal)] == [1, 2]
    assert time.process_time() - began < 2
