"""Job files that somebody else, an older version or a fault has written: shown, never believed."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from serving import serving

from samecurve.errors import UserError
from samecurve.run.directory import Run
from samecurve_products.page.jobs.busy import Devices
from samecurve_products.page.jobs.desk import Desk, JobCommand
from samecurve_products.page.jobs.processes import ProcessName
from samecurve_products.page.jobs.queue import NewJob, Queue, job_rows
from samecurve_products.page.queue_verb import queue as verbs
from samecurve_products.page.roots import Catalogue, Root

NO_RUNS = Devices(list)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMECURVE_CACHE", str(tmp_path_factory.mktemp("cache")))


def write_job(queue: Path, folder: str = "waiting", **more: Any) -> Path:
    """The file of a job without a mark."""
    values: dict[str, Any] = {"id": "0123456789ab", "name": "tiny", "argv": ["true"]}
    values |= {"cwd": str(queue.parent), "devices": ["cpu"], "added": time.time(), "order": 1}
    path = queue / folder / "1-0123456789ab.json"
    for name in ("waiting", "running", "done", "logs"):
        (queue / name).mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**values, **more}))
    return path


@pytest.fixture
def verb(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Any:
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> str:
        verbs.main(list(words), standalone_mode=False)
        return capsys.readouterr().out

    return call


def test_a_mark_of_half_a_character_is_foreign(tmp_path: Path, verb: Any) -> None:
    """It is legal JSON, and no verb of the queue ends with it."""
    write_job(tmp_path / "queue", mark="\ud800")
    assert "foreign" in verb("list")
    with pytest.raises(SystemExit, match="1"):
        verb("work")
    with serving(tmp_path) as served:
        (row,) = served.ask("/api/queue").json["jobs"]
        assert row["state"] == "foreign"
    assert "removed job" in verb("remove", "tiny")


BROKEN: dict[str, dict[str, object]] = {
    "a run with a zero byte": {"run": "a\0b"},
    "a folder with a zero byte": {"cwd": "a\0b"},
    "a word with a zero byte": {"argv": ["true", "a\0b"]},
    "a run of half a character": {"run": "\ud800"},
    "a folder of half a character": {"cwd": "/\ud800"},
    "a word of half a character": {"argv": ["\ud800"]},
    "a name of half a character": {"name": "\ud800"},
    "a device of half a character": {"devices": ["\ud800"]},
    "an endless exit code": {"exit": float("inf")},
    "an endless order": {"order": float("inf")},
    "a time that is no number": {"added": float("nan")},
    "an id that is a path": {"id": "../../x"},
    "an id that is a command": {"id": "x; touch y"},
}


@pytest.mark.parametrize("folder", ["waiting", "running", "done"])
@pytest.mark.parametrize("change", BROKEN)
def test_a_file_that_is_no_job_stops_nothing(tmp_path: Path, change: str, folder: str) -> None:
    queue = Queue(tmp_path / "queue")
    path = write_job(queue.home, folder, **BROKEN[change])
    own = queue.add(NewJob(name="own", argv=["true"], cwd=tmp_path, devices=("cpu",)))
    assert [row["id"] for row in job_rows(queue, NO_RUNS)] == [own.id]
    queue.settle()
    queue.move(own, "up")
    assert queue.broken() == ([path] if folder == "waiting" else [])


def test_a_name_in_other_bytes_is_a_name(tmp_path: Path, verb: Any) -> None:
    """Linux names files in any bytes: Python has them as halves of characters."""
    queue = Queue(tmp_path / "queue")
    queue.add(NewJob(name="own", argv=["cat", "\udcff"], cwd=tmp_path, devices=("cpu",)))
    (job,) = queue.jobs()
    assert not job.foreign
    assert "waiting" in verb("list")


def test_the_list_names_files_that_are_no_job(tmp_path: Path, verb: Any) -> None:
    write_job(tmp_path / "queue").write_text("{")
    says = "queue/waiting/1-0123456789ab.json is no job"
    assert says in verb("list")
    assert "delete the file" in verb("list")
    assert json.loads(verb("list", "--json"))["jobs"] == []


def test_accept_shows_name_command_and_folder_on_a_line_each(tmp_path: Path, verb: Any) -> None:
    """Line breaks in them can't draw another command below the true one."""
    faked = "\n" * 60 + "  command  samecurve train -f tiny.yaml\n\t\x1b[2J\u2028"
    argv = ["sh", "-c", f"touch x{faked}"]
    write_job(tmp_path / "queue", argv=argv, name=f"a{faked}", cwd=f"/tmp/{faked}")
    assert len(verb("list").splitlines()) == 2
    shown = verb("accept", "0123", "--yes")
    lines = shown.splitlines()
    begins = ("foreign  job", "  command  sh", "  folder   /tmp/", "accepted job")
    assert [line.startswith(begin) for line, begin in zip(lines, begins, strict=True)] == [True] * 4
    assert "touch x\\n\\n" in lines[1]
    assert "\t" not in shown


def test_a_job_of_an_older_version_keeps_its_devices_while_it_lives(tmp_path: Path) -> None:
    """It has no mark; another run on its devices would disturb it, a resume would meet it."""
    run = tmp_path / "runs" / "old"
    process = ProcessName.own().to_json()
    path = write_job(tmp_path / "queue", "running", process=process, run=str(run))
    Run(run).journal.parent.mkdir(parents=True, exist_ok=True)
    queue = Queue(tmp_path / "queue")
    queue.add(NewJob(name="own", argv=["true"], cwd=tmp_path, devices=("cpu",)))
    assert queue.start_next(NO_RUNS) == []
    assert [why for job, why in queue.waiting(NO_RUNS)] == ["waits for the CPU (job tiny uses it)"]
    desk = Desk(Catalogue([Root.of(tmp_path)]))
    command = JobCommand(["--version"], "again", tmp_path, "cpu", run)
    with pytest.raises(UserError, match="a job of this run goes on"):
        desk.start_command(command)
    ended = {**json.loads(path.read_text()), "process": {**process, "began": "long ago"}}
    path.write_text(json.dumps(ended))
    assert [why for job, why in queue.waiting(NO_RUNS)] == [""]
