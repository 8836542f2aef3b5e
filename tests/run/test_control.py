"""Requests to a live run."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from commands import losses, running, samecurve, steps_written, until, write_config
from samecurve.core.events import REQUESTS
from samecurve.observe import read_events
from samecurve.run.directory import Run
from samecurve.run.directory import attempt as attempts
from samecurve.run.directory.attempt import ControlFile, Requests


def test_a_live_run_does_what_it_is_asked_for(tmp_path: Path, corpus: Path) -> None:
    """Lines in control.jsonl that name this attempt; all ranks act at one step.

    Lines of another attempt, or none, are passed over.
    """
    config = write_config(tmp_path, corpus, steps=100_000, save=50_000)
    with running(
        "train", "-f", config, "--save-dir", "run", "--devices", "cpu:2", cwd=tmp_path
    ) as live:
        run = tmp_path / "run"
        until(lambda: steps_written(run) > 3)
        attempt = next(
            event.values["attempt"]
            for event in read_events(run / "journal.jsonl")
            if event.kind == "planned"
        )
        with open(run / "control.jsonl", "a") as control:
            control.write(
                "no JSON\n" + json.dumps({"attempt": "another", "request": "stop"}) + "\n"
            )
            control.writelines(
                json.dumps({"attempt": attempt, "request": request}) + "\n"
                for request in ("evaluate", "sample", "save")
            )
        until(lambda: any(event.kind == "saved" for event in read_events(run / "journal.jsonl")))
        with open(run / "control.jsonl", "a") as control:
            control.write(json.dumps({"attempt": attempt, "request": "stop"}) + "\n")
        done = live.end()
    assert done.returncode == 0, done
    acted = [
        (event.kind, event.step)
        for event in read_events(run / "journal.jsonl")
        if event.kind in {"evaluated", "sampled", "saved"}
    ]
    assert [kind for kind, _ in acted] == ["evaluated", "sampled", "saved", "saved"]
    assert len({step for _, step in acted}) == 2


def test_saves_go_by_the_clock_and_take_one_percent_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(attempts, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    requests = Requests(ControlFile(Run(tmp_path), "attempt", save_seconds=600))

    def asks_at(second: float) -> bool:
        clock[0] = second
        return bool(requests.pending()[REQUESTS.index("save")])

    assert [asks_at(second) for second in (1, 599, 600, 601, 5000)] == [0, 0, 1, 0, 0]
    requests.saved(blocked=2.0)  # at 5000 s
    assert [asks_at(second) for second in (5599, 5601, 5602)] == [0, 1, 0]
    requests.saved(blocked=30.0)  # 1 % of 3000 s
    assert [asks_at(second) for second in (8601, 8603)] == [0, 1]


@pytest.mark.long
def test_a_curve_does_not_depend_on_saves_by_the_clock(
    unbroken_run: Path, tmp_path: Path, corpus: Path
) -> None:
    """In three starts: the first save of each is soon, and one percent of the time of so short a
    run may allow no second one.
    """
    line = (
        *("train", "-f", write_config(tmp_path, corpus), "--save-dir", "run"),
        *("--devices", "cpu:2", "--set", "train.save_every=0.001min", "--set", "train.keep=0"),
    )
    for stop in (("--stop-after", 20), ("--stop-after", 20), ()):
        samecurve(*line, *stop, cwd=tmp_path)
    events = read_events(tmp_path / "run/journal.jsonl")
    saved = {event.step for event in events if event.kind == "saved"}
    assert saved > {20, 40, 60}
    assert len(saved - {20, 40, 60}) > 2  # those by the clock
    assert losses(tmp_path / "run") == pytest.approx(losses(unbroken_run), rel=1e-12)
