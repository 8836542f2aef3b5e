"""Requests to a live run."""

import json
from pathlib import Path

from commands import started, steps_written, until, write_config
from samecurve.observe.journal import read_events


def test_a_live_run_does_what_it_is_asked_for(tmp_path: Path, corpus: Path) -> None:
    """Lines in control.jsonl that name this attempt; all ranks act at one step.

    Lines of another attempt, or none, are passed over.
    """
    config = write_config(tmp_path, corpus, steps=100_000, save=50_000)
    with started(
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
        output, _ = live.communicate(timeout=60)
    assert live.returncode == 0, output
    acted = [
        (event.kind, event.step)
        for event in read_events(run / "journal.jsonl")
        if event.kind in {"evaluated", "sampled", "saved"}
    ]
    assert [kind for kind, _ in acted] == ["evaluated", "sampled", "saved", "saved"]
    assert len({step for _, step in acted}) == 2
