"""Kubeflow Trainer is told the progress of a run, by its own protocol, over HTTP."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from commands import samecurve, write_config
from samecurve.observe import read_events
from samecurve.observe.trackers import KUBEFLOW_VARIABLES, track

TOKEN = "a token of this pod"


class _Server(HTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.reports: list[dict[str, Any]] = []
        self.tokens: set[str] = set()


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.reports.append(json.loads(body)["trainerStatus"])
        self.server.tokens.add(self.headers["Authorization"])
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...  # not into the test's output


@pytest.fixture
def server() -> Iterator[_Server]:
    with _Server() as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def test_the_progress_of_a_run_is_reported(server: _Server, tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    url = f"http://127.0.0.1:{server.server_port}/progress"
    places = (url, "", str(tmp_path / "token"))
    ended = threading.Event()
    ended.set()

    def report() -> None:
        track("kubeflow", tmp_path / "run", "api", json.dumps(places), ended)

    config = write_config(tmp_path, corpus, steps=40)
    train = ("train", "-f", config, "--devices", "cpu", "--save-dir", "run")
    samecurve(*train, "--stop-after", "10", cwd=tmp_path)
    report()
    half = len(server.reports)
    assert server.reports[-1]["progressPercentage"] == 25
    samecurve(*train, cwd=tmp_path)
    report()
    assert len(server.reports) > half
    last = server.reports[-1]
    assert (last["progressPercentage"], last["estimatedRemainingSeconds"]) == (100, 0)
    metrics = {metric["name"]: float(metric["value"]) for metric in last["metrics"]}
    ends = {event.kind: event.values for event in read_events(tmp_path / "run/journal.jsonl")}
    assert metrics["train/loss"] == pytest.approx(ends["step"]["loss"], rel=1e-5)
    assert {"train/lr", "eval/loss"} <= metrics.keys()
    assert server.tokens == {f"Bearer {TOKEN}"}


@pytest.mark.long
def test_a_report_that_fails_is_mentioned_and_training_goes_on(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text(TOKEN)
    for name, value in zip(
        KUBEFLOW_VARIABLES, ("http://127.0.0.1:9/", "", str(tmp_path / "token")), strict=True
    ):
        monkeypatch.setenv(name, value)
    config = write_config(tmp_path, corpus, steps=4)
    done = samecurve("train", "-f", config, "--save-dir", "run", cwd=tmp_path, afresh=True)
    assert "done   step 4" in done.stdout
    warned = [
        event.values["text"]
        for event in read_events(tmp_path / "run/journal.jsonl")
        if event.kind == "warned"
    ]
    assert any("Kubeflow Trainer: progress was not reported" in text for text in warned)
