"""The web page's server: which runs it finds and in which state, their pages, logs and actions."""

import io
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from serving import BEGAN, append, locked, make_run, planned, serving, step

from samecurve.core.events import Event
from samecurve.errors import UserError
from samecurve.observe import append_event
from samecurve.run.directory import Run
from samecurve_products.page import indexer
from samecurve_products.page.errors import RefusedError
from samecurve_products.page.journal_tail import live_attempt, read_tail
from samecurve_products.page.kill import kill
from samecurve_products.page.lock_file import launcher
from samecurve_products.page.logs import LINES
from samecurve_products.page.ui_verb import ui

END = {"seconds": 12.0, "loss": 1.5, "goodput": 0.9, "steps": 3, "memory_bytes_by_device": [1]}


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.05)


class OfAnotherLibrary(logging.StreamHandler[io.StringIO]):
    """A handler that closes its stream with itself, as absl's does."""

    def close(self) -> None:
        self.stream.close()
        super().close()


def test_a_server_closes_no_stream_of_another_librarys_log(tmp_path: Path) -> None:
    handler = OfAnotherLibrary(io.StringIO())
    with serving(tmp_path):
        assert not handler.stream.closed


# -- the list


def test_states_of_runs(tmp_path: Path) -> None:
    """A state follows from the journal's last lines and from who holds the lock."""
    ends = {kind: {"kind": kind, "step": 2, **END} for kind in ("finished", "stopped")}
    ends["failed"] = {"kind": "failed", "step": 2, "cause": "no memory, token=abc", "remedy": ""}
    for kind, line in ends.items():
        make_run(tmp_path / "runs" / kind, planned(), step(1), step(2), line)
    make_run(tmp_path / "runs" / "cut", planned(), step(1), step(7, 1.25))
    make_run(tmp_path / "runs" / "empty").joinpath("journal.jsonl").unlink()
    again = {"kind": "resumed", "step": 2, "attempt": "1-2", "text": "from step 2"}
    make_run(tmp_path / "runs" / "again", planned(), step(3), ends["failed"], planned("1-2"), again)
    live = make_run(tmp_path / "runs" / "live", planned(), step(1), step(2, loss=1.5))
    begun = make_run(tmp_path / "runs" / "begun", planned())
    with serving(tmp_path) as served, locked(live), locked(begun):
        rows = served.rows()
    states = {name.removeprefix("runs/"): row["state"] for name, row in rows.items()}
    assert states == {
        **{kind: kind for kind in ends},
        "cut": "interrupted",
        "again": "interrupted",
        "empty": "not started",
        "live": "running",
        "begun": "starting",
    }
    row = rows["runs/live"]
    assert (row["step"], row["steps"], row["loss"], row["world"]) == (2, 100, 1.5, 2)
    assert (row["task"], row["strategy"], row["devices"]) == ("language", "ddp", "2 CPU ranks")
    assert row["rate"] == {"value": 64_000.0, "unit": "tokens/s"}
    assert row["seconds"] < 60
    assert rows["runs/failed"]["cause"] == "no memory, token=[hidden]"
    assert "cause" not in rows["runs/finished"]
    assert rows["runs/cut"]["seconds"] == pytest.approx(7)
    assert rows["runs/again"]["step"] == 2


def test_the_list_follows_the_files(tmp_path: Path) -> None:
    home = make_run(tmp_path / "a", planned(), step(1))
    with serving(tmp_path) as served:
        with locked(home):
            assert served.rows()["a"]["step"] == 1
            append(home, step(2, loss=0.5))
            assert served.rows()["a"]["loss"] == 0.5
        assert served.rows()["a"]["state"] == "interrupted"
        append(home, {"kind": "finished", "step": 2, **END})
        assert served.rows()["a"]["state"] == "finished"
        make_run(tmp_path / "b" / "c", planned())
        assert set(served.rows()) == {"a", "b/c"}


def test_which_directories_are_runs(tmp_path: Path) -> None:
    """Three below a root, not hidden, no links, no run in a run; a root may be a run itself."""
    for place in ("1", "1/2/3", ".hidden/x", "node_modules/x", "a/b/c", "a/b/c2/d", "run"):
        if place != "1/2/3":
            make_run(tmp_path / "root" / place, planned())
    make_run(tmp_path / "root" / "run" / "checkpoints" / "inner", planned())
    (tmp_path / "root" / "link").symlink_to(tmp_path / "root" / "run")
    alone = make_run(tmp_path / "alone", planned())
    with serving(tmp_path / "root", alone, tmp_path / "root" / "a") as served:
        rows = served.rows()
    assert set(rows) == {"1", "a/b/c", "run", "alone", "b/c2/d"}


def test_a_long_list_costs_little(tmp_path: Path) -> None:
    for number in range(200):
        make_run(tmp_path / f"run-{number}", planned(), *map(step, range(1, 30)))
    with serving(tmp_path) as served:
        served.rows()
        calls: Counter[str] = Counter()

        def count(_frame: object, event: str, function: object) -> None:
            if event == "c_call":
                calls[function.__name__] += 1  # type: ignore[attr-defined]

        sys.setprofile(count)
        served.site.runs.rows(served.site.catalogue.runs())
        sys.setprofile(None)
    assert calls["stat"] <= 4 * 200
    assert not calls["open"]  # no journal has changed
    assert calls.total() < 600 * 200


def test_damaged_files_hide_no_run(tmp_path: Path) -> None:
    home = make_run(tmp_path / "a", planned(), step(1))
    (home / "plan.json").write_text("{")
    (home / "config.yaml").write_text("task: [")
    (home / "lock").write_text("[]")
    with open(home / "journal.jsonl", "ab") as file:
        file.write(b'\xff\xfe{"kind"}\n[1]\n{"kind": "step", "step": "x", "time": 1}\n{"torn')
    with serving(tmp_path) as served:
        row = served.rows()["a"]
        assert (row["state"], row["step"], row["steps"]) == ("interrupted", 1, 0)
        page = served.ask(f"/api/runs/{row['id']}/page")
    assert page.status == 200
    assert "plan.json can't be read" in page.body.decode()


def test_a_huge_line_at_the_end(tmp_path: Path) -> None:
    """The last whole event counts, also where one line fills the block that is read."""
    arrays = {f"model/{number}": "0" * 64 for number in range(3000)}
    home = make_run(tmp_path / "a", planned(), step(5), {"kind": "hashed", "arrays": arrays})
    assert read_tail(home / "journal.jsonl").step == 5


# -- a run's page


def test_a_run_page(tmp_path: Path) -> None:
    """Only what is new is sent: points after those that the browser has, blocks of another hash."""
    sensors = {"kind": "sensors", "step": 3, "utilisation_by_device": [0.5, None]}
    home = make_run(tmp_path / "a", planned(), *map(step, range(1, 4)), sensors)
    with serving(tmp_path) as served, locked(home):
        path = f"/api/runs/{served.run_id('a')}/page"
        first = served.ask(path).json
        assert (first["state"], first["live"], first["reading"]) == ("running", True, 1.0)
        assert {"stop", "kill", "save"} <= set(first["actions"])
        assert set(first["page"]) == {"title", "head", "charts", "static"}
        columns = first["runs"][0]["columns"]
        assert (columns["start"], columns["count"]) == (0, 3)
        assert [device["utilisation"] for device in first["sensors"]["devices"]] == [0.5, None]
        query = f"?generation={columns['generation']}&count=3&blocks={first['hash']}"
        again = served.ask(path + query).json
        assert "page" not in again
        assert again["runs"][0]["columns"]["arrays"] == {}
        append(home, step(4))
        time.sleep(0.3)  # readings count for a moment
        new = served.ask(path + query).json["runs"][0]["columns"]
        assert (new["start"], new["count"], new["generation"]) == (3, 4, columns["generation"])


def test_two_runs_are_compared(tmp_path: Path) -> None:
    make_run(tmp_path / "a", planned(), step(1), step(2))
    make_run(tmp_path / "b", planned(), step(1), step(2, loss=2.25))
    with serving(tmp_path) as served:
        ids = f"{served.run_id('a')},{served.run_id('b')}"
        page = served.ask(f"/api/compare?runs={ids}").json
        exact = served.ask(f"/api/compare/bits?runs={ids}").json
        assert served.ask("/api/compare?runs=").status == 400
        assert served.ask(f"/api/compare?runs={ids},0123456789abcdef").status == 404
    assert [run["name"] for run in page["runs"]] == ["a", "b"]
    assert exact["equal"] is False
    assert any("step 2: loss" in line for line in exact["lines"])


def test_the_machine(tmp_path: Path) -> None:
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "bench.json").write_text('{"layouts": 1}')
    with serving(tmp_path) as served:
        state, page = served.ask("/api/state").json, served.ask("/api/machine").json
    assert state["cores"] >= 1
    assert "GPU" in state["detected"]
    assert "bench/bench.json" in json.dumps(page)
    assert "can't be read" in json.dumps(page)


def test_pictures(tmp_path: Path) -> None:
    png = b"\x89PNG\r\n\x1a\n" + bytes(20)
    home = make_run(tmp_path / "a", planned(), step(1))
    (home / "samples").mkdir()
    (home / "samples" / "step-00000001-0.png").write_bytes(png)
    (home / "samples" / "no.png").write_bytes(b"<svg onload=alert(1)>" + bytes(30))
    with serving(tmp_path) as served:
        path = f"/api/runs/{served.run_id('a')}/picture"
        answer = served.ask(f"{path}/step-00000001-0.png")
        assert served.ask(f"{path}/no.png").status == 404
    assert (answer.status, answer.headers["content-type"], answer.body) == (200, "image/png", png)


# -- long journals


@pytest.fixture
def long_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose journal counts as long."""
    monkeypatch.setattr(indexer, "LONG", 1 << 18)
    monkeypatch.setattr("samecurve_products.page.run_pages.LONG", 1 << 18)
    return make_run(tmp_path / "long", planned(), *map(step, range(1, 5001)), steps=5000)


def test_a_long_journal_is_read_by_a_child(long_run: Path, tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        path = f"/api/runs/{served.run_id('long')}/page"
        first = served.ask(path).json
        assert first["reading"] <= 1
        wait_for(lambda: bool(served.ask(path).json["reading"] == 1))
        columns = served.ask(path).json["runs"][0]["columns"]
    assert columns["count"] * columns["steps_per_point"] >= 5000
    assert indexer.state_path(long_run).stat().st_size > 0


def test_the_next_server_need_not_read_it_again(
    long_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = indexer.state_path(long_run)
    state.parent.mkdir(parents=True, exist_ok=True)
    indexer.index(long_run, state)
    append(long_run, step(5001))
    monkeypatch.setattr(indexer.Indexer, "_read", lambda *_: pytest.fail("a child was started"))
    with serving(tmp_path) as served:
        answer = served.ask(f"/api/runs/{served.run_id('long')}/page").json
    assert answer["reading"] == 1
    assert answer["page"]["head"]


@pytest.mark.usefixtures("long_run")
def test_a_child_that_fails_leaves_the_reading_to_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexer, "__name__", "samecurve.no_such_module")
    with serving(tmp_path) as served:
        path = f"/api/runs/{served.run_id('long')}/page"
        wait_for(lambda: bool(served.ask(path).json["reading"] == 1))


# -- logs


def test_logs(tmp_path: Path) -> None:
    home = make_run(tmp_path / "a", planned(), step(1))
    (home / "logs").mkdir()
    lines = [f"line {number}" for number in range(1, 1001)]
    (home / "logs" / "rank-0.log").write_text("\n".join([*lines, "50%\r60%\rdone", ""]))
    for rank in (10, 2):
        (home / "logs" / f"rank-{rank}.log").write_text(f"rank {rank}\n")
    (home / "logs" / "other.json").write_text("{}")
    with serving(tmp_path) as served:
        path = f"/api/runs/{served.run_id('a')}/logs"
        last = served.ask(path).json
        before = served.ask(f"{path}?before={last['start']}").json
        found = served.ask(f"{path}?search=LINE+99").json
        other = served.ask(f"{path}?file=rank-10.log").json
        assert served.ask(f"{path}?file=other.json").status == 404
        assert served.ask(f"{path}?before=x").status == 400
    assert last["files"] == ["rank-0.log", "rank-2.log", "rank-10.log"]
    assert last["lines"] == [*lines[-LINES + 1 :], "done"]
    assert last["more"]
    assert before["lines"][-1] == lines[-LINES]
    assert len(before["lines"]) == LINES
    assert found["lines"] == ["line 99", *(f"line 99{digit}" for digit in range(10))]
    assert other["lines"] == ["rank 10"]


# -- actions


def requests_of(home: Path) -> list[tuple[str, str]]:
    lines = map(json.loads, (home / "control.jsonl").read_text().splitlines())
    return [(line["attempt"], line["request"]) for line in lines]


def test_a_live_run_is_asked_by_its_attempt(tmp_path: Path) -> None:
    home = make_run(tmp_path / "a", planned("1-1"), step(1), planned("1-2"), step(1))
    with serving(tmp_path) as served:
        path = f"/api/runs/{served.run_id('a')}"
        with locked(home):
            for action in ("save", "evaluate", "sample", "stop"):
                assert "asked" in served.write(f"{path}/{action}").json["message"]
            assert served.write(f"{path}/resume").status == 409
            assert served.write(path, method="DELETE").status == 409
        assert served.write(f"{path}/stop").status == 409
        assert served.write(f"{path}/destroy").status == 404
        append(home, {"kind": "stopped", "step": 1, **END})
        with locked(home):  # for a moment yet
            page = served.ask(f"{path}/page").json
            assert (page["actions"], page["devices"]) == (["kill"], "cpu:2")
            assert "just ending" in served.write(f"{path}/evaluate").cause
    assert requests_of(home) == [("1-2", what) for what in ("save", "evaluate", "sample", "stop")]


def test_the_attempt_is_found_in_the_journal(tmp_path: Path) -> None:
    """Neither a text that looks like it, nor how far back it stands, leads astray."""
    lines = [planned("1-7"), {"kind": "sampled", "texts": ['{"attempt": "1-9"}']}]
    lines += [{"kind": "warned", "attempt": "1-8", "text": "x"}, *map(step, range(1, 2000))]
    home = make_run(tmp_path / "a", *lines)
    assert live_attempt(home / "journal.jsonl") == "1-7"
    again = {"kind": "restarted", "attempt": "1-10", "text": "", "cause": ""}
    append_event(home / "journal.jsonl", Event("restarted", 3, again))
    assert live_attempt(home / "journal.jsonl") == "1-10"


def test_a_run_is_deleted_alone(tmp_path: Path) -> None:
    home = make_run(tmp_path / "a", planned(), step(1))
    other = make_run(tmp_path / "b", planned())
    (home / "samples").symlink_to(other)
    with serving(tmp_path, other) as served:
        answer = served.write(f"/api/runs/{served.run_id('a')}", method="DELETE")
        assert answer.status == 200
        assert set(served.rows()) == {"b"}
    assert not home.exists()
    assert (other / "plan.json").exists()


def test_code_that_came_with_a_run_is_not_resumed(tmp_path: Path) -> None:
    home = make_run(tmp_path / "root" / "a", planned(), step(1))
    task = home / "task.py"
    task.write_text("raise SystemExit('it was imported')")
    outside = tmp_path / "outside.py"
    outside.write_text(task.read_text())
    with serving(tmp_path / "root") as served:
        path = f"/api/runs/{served.run_id('a')}"
        for file in (task, outside):
            (home / "config.yaml").write_text(f"task: {file}:MyTask\n")
            for action in ("resume", "evaluate", "sample"):
                answer = served.write(f"{path}/{action}")
                assert answer.status == 403
                assert file.name in answer.cause
        assert served.ask("/api/queue").json["jobs"] == []


LAUNCHER = """
import fcntl, json, os, signal, socket, sys, time
heard = []
def hear(*_):
    heard.append(1)
    if len(heard) > 1 and sys.argv[2] != "deaf": os._exit(143)
signal.signal(signal.SIGTERM, hear)
lock = open(sys.argv[1], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
boot = open("/proc/sys/kernel/random/boot_id").read().strip()
entry = {"host": socket.gethostname(), "boot": boot, "pid": os.getpid(), "since": time.time()}
lock.write(json.dumps(entry)); lock.flush()
print("ready", flush=True)
while True: time.sleep(1)
"""


@contextmanager
def launched(home: Path, how: str = "") -> Iterator[subprocess.Popen[str]]:
    """A process that holds a run's lock, and leaves at the second SIGTERM (deaf: never)."""
    command = [sys.executable, "-c", LAUNCHER, str(home / "lock"), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def test_kill_asks_twice(tmp_path: Path) -> None:
    home = make_run(tmp_path / "a", planned(), step(1))
    with launched(home) as process, serving(tmp_path) as served:
        answer = served.write(f"/api/runs/{served.run_id('a')}/kill")
        assert "killed" in answer.json["message"]
        assert process.wait(10) == 143
        assert served.write(f"/api/runs/{served.run_id('a')}/kill").status == 409


def test_kill_ends_a_launcher_that_does_not_listen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = make_run(tmp_path / "a", planned(), step(1))
    monkeypatch.setattr("samecurve_products.page.kill._PATIENCE", 0.5)
    with launched(home, "deaf") as process:
        kill(Run(home))
        assert process.wait(10) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({"host": "elsewhere"}, "a process of elsewhere"),
        ({"boot": "another"}, "before this machine was started"),
        ({"pid": 1}, "names no launcher"),
        ({"since": BEGAN - 1e9}, "younger than the lock"),
        ({"pid": os.getppid()}, "does not hold the lock"),
    ],
)
def test_kill_reaches_no_other_process(tmp_path: Path, entry: Mapping[str, Any], why: str) -> None:
    """A lock may name any process: a copied one, or one whose number was given to another."""
    home = make_run(tmp_path / "a", planned(), step(1))
    with launched(home) as process:
        values = json.loads((home / "lock").read_text())
        (home / "lock").write_text(json.dumps({**values, **entry}))
        assert why in str(launcher(Run(home)))
        with pytest.raises(RefusedError, match="can't be killed"):
            kill(Run(home))
        assert process.poll() is None


# -- the command


@contextmanager
def started(root: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`samecurve ui` as a process, and the line with its address."""
    command = [sys.executable, "-m", "samecurve", "ui", str(root), "--port", "0", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline()
        finally:
            process.kill()


def test_the_command(tmp_path: Path) -> None:
    """One address; the end of the server ends nothing else; no engine is imported."""
    with started(tmp_path) as (process, line):
        assert line.startswith("Samecurve: http://127.0.0.1:")
        libraries = " ".join(map(str, Path(f"/proc/{process.pid}/maps").read_text().splitlines()))
        assert "libtorch" not in libraries
        assert psutil.Process(process.pid).memory_info().rss < 150e6
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert process.stdout is not None
        assert process.stdout.read().splitlines()[-1].endswith("runs and jobs go on")


def test_a_taken_port(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        command = [sys.executable, "-m", "samecurve", "ui", str(tmp_path)]
        command += ["--port", str(served.port)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "--port 0" in done.stderr


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert ui.callback is not None
    with pytest.raises(UserError, match="fastapi and uvicorn: not installed") as refused:
        ui.callback((), host="127.0.0.1", port=0, allow_remote=False)
    assert "[ui]" in refused.value.remedy


def test_imports() -> None:
    """The server imports no engine and no library that draws."""
    heavy = "{'torch', 'jax', 'matplotlib', 'transformers', 'PIL', 'pandas'}"
    code = f"import sys, samecurve_products.page.serve; sys.exit(str({heavy} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stderr.strip() == "set()"
