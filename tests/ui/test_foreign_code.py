"""Each place where a file in a received folder could become a command, or code that is run.

A job without this user's mark is shown and never started. The class that a run or a config names is
imported by the page only if its file lies below the page's folders and came with no run.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from serving import make_run, planned, serving, step

from samecurve.errors import UserError
from samecurve.processes import Call, output_of, python_module
from samecurve.run.directory.attempt import _commit
from samecurve_products.page.form.answers import Answers, RefusedError
from samecurve_products.page.form.places import Roots
from samecurve_products.page.jobs import marks
from samecurve_products.page.jobs.busy import Devices
from samecurve_products.page.jobs.job import Job
from samecurve_products.page.jobs.queue import NewJob, Queue, job_rows
from samecurve_products.page.jobs.work import work, working
from samecurve_products.page.queue_verb import queue as verbs

NO_RUNS = Devices(list)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("SAMECURVE_CACHE", str(cache))
    return cache


def touching(path: Path) -> list[str]:
    """A command that leaves a file."""
    return [sys.executable, "-S", "-c", f"open({str(path)!r}, 'w')"]


def write_received(queue: Path, argv: list[str], folder: str = "waiting", **more: Any) -> Path:
    """The file of a job, as somebody else would write it into a folder."""
    values: dict[str, Any] = {"id": "0123456789ab", "name": "tiny", "argv": argv}
    values |= {"shown": "samecurve train -f tiny.yaml", "cwd": str(queue.parent)}
    values |= {"devices": ["cpu"], "added": time.time(), "order": 1, **more}
    path = queue / folder / f"{1:020d}-{values['id']}.json"
    for name in ("waiting", "running", "done", "logs"):
        (queue / name).mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))
    return path


def new(home: Path, argv: list[str]) -> NewJob:
    return NewJob(name="own", argv=argv, cwd=home, devices=("cpu",))


def ended(queue: Queue) -> Job:
    """The one job of a queue, once it has ended."""
    end = time.monotonic() + 20
    while (job := queue.jobs()[0]).outcome().state not in {"finished", "failed"}:
        assert time.monotonic() < end
        time.sleep(0.02)
    return job


# -- jobs


def test_the_page_never_starts_a_job_that_came_with_a_folder(tmp_path: Path) -> None:
    """Neither by itself nor after a move; the page shows what the job would run."""
    was_run = tmp_path / "was-run"
    root = tmp_path / "received"
    write_received(root / "queue", touching(was_run))
    with serving(root) as served:
        (row,) = served.ask("/api/queue").json["jobs"]
        assert row["state"] == "foreign"
        assert "was-run" in row["command"]
        assert "samecurve train" not in row["command"]
        assert f"samecurve queue accept {row['id']}" in row["why"]
        served.write(f"/api/queue/{row['id']}/up")
        time.sleep(1.2)  # the worker looks every 0.5 s
        (row,) = served.ask("/api/queue").json["jobs"]
        assert row["state"] == "foreign"
        assert served.write(f"/api/queue/{row['id']}", method="DELETE").status == 200
    assert not was_run.exists()


@pytest.mark.parametrize("folder", ["waiting", "running", "done"])
def test_no_folder_of_a_queue_starts_a_received_job(tmp_path: Path, folder: str) -> None:
    queue = tmp_path / "queue"
    path = write_received(queue, touching(tmp_path / "was-run"), folder, starter=None)
    assert Queue(queue).start_next(NO_RUNS) == []
    Queue(queue).settle()
    # the process beside a job, which starts the command, looks too
    done = output_of(
        Call("samecurve_products.page.jobs.shepherd", (str(path),)).command, seconds=60
    )
    assert done.returncode == 1
    time.sleep(0.1)
    assert not (tmp_path / "was-run").exists()


def test_a_received_job_holds_up_no_other(tmp_path: Path) -> None:
    """It keeps no devices, and `queue work` ends, though the job stays."""
    queue = Queue(tmp_path / "queue")
    write_received(queue.home, ["true"])
    write_received(queue.home, ["true"], "running", id="0123456789cd", order=2)
    queue.add(new(tmp_path, touching(tmp_path / "own")))
    assert [row.get("why") for row in job_rows(queue, NO_RUNS) if row["name"] == "own"] == [None]
    with working(queue, "a test"):
        assert work(queue, NO_RUNS) == 0
    assert (tmp_path / "own").exists()
    states = {job.name: job.outcome().state for job in queue.jobs() if job.folder != "running"}
    assert states == {"own": "finished", "tiny": "foreign"}


CHANGES: Mapping[str, Mapping[str, object]] = {
    "another command": {"argv": ["true"]},
    "another folder": {"cwd": "/"},
    "other devices": {"devices": []},
    "another run": {"run": "/tmp/x"},
    "another name": {"name": "other"},
    "another id": {"id": "ffffffffffff"},
    "no mark": {"mark": None},
    "a mark that is no text": {"mark": ["a"]},
    "a mark in other letters": {"mark": "\u00e9" * 64},
    "an empty mark": {"mark": ""},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_job_that_was_changed_is_foreign(tmp_path: Path, change: str) -> None:
    queue = Queue(tmp_path / "queue")
    job = queue.add(new(tmp_path, touching(tmp_path / "own")))
    assert queue.jobs()[0].outcome().state == "waiting"
    values = json.loads(job.path.read_text())
    job.path.write_text(json.dumps({**values, **CHANGES[change]}))
    assert queue.jobs()[0].outcome().state == "foreign"
    assert queue.start_next(NO_RUNS) == []


def test_a_mark_counts_for_one_user_and_one_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An own job that comes back in somebody else's folder is not run a second time."""
    queue = Queue(tmp_path / "queue")
    job = queue.add(new(tmp_path, touching(tmp_path / "own")))
    copy = tmp_path / "received" / "queue" / "waiting" / job.file_name
    copy.parent.mkdir(parents=True)
    copy.write_text(job.path.read_text())
    (returned,) = Queue(tmp_path / "received" / "queue").jobs()
    assert returned.foreign
    monkeypatch.setenv("SAMECURVE_CACHE", str(tmp_path / "another-user"))
    (seen,) = queue.jobs()
    assert seen.foreign


def test_moving_a_job_keeps_its_mark(tmp_path: Path) -> None:
    queue = Queue(tmp_path / "queue")
    first, _ = [queue.add(new(tmp_path, touching(tmp_path / "own"))) for _ in range(2)]
    queue.move(first, "down")
    assert [job.foreign for job in queue.jobs()] == ["", ""]


def test_the_secret_is_the_users_alone(tmp_path: Path, own_cache: Path) -> None:
    """Mode 600; one that others can read, or that is a link, marks nothing."""
    queue = Queue(tmp_path / "queue")
    queue.add(new(tmp_path, ["true"]))
    (secret,) = own_cache.glob("job-secret-*")
    assert secret.stat().st_mode & 0o777 == 0o600
    content = secret.read_bytes()
    assert len(content) == 32
    secret.chmod(0o644)
    assert "chmod 600" in queue.jobs()[0].foreign
    with pytest.raises(UserError, match="can be read or written by others") as raised:
        queue.add(new(tmp_path, ["true"]))
    assert f"chmod 600 {secret}" in raised.value.remedy
    secret.unlink()
    (tmp_path / "elsewhere").write_bytes(content)
    secret.symlink_to(tmp_path / "elsewhere")
    assert queue.jobs()[0].foreign
    secret.unlink()
    secret.write_bytes(b"short")
    secret.chmod(0o600)
    assert queue.jobs()[0].foreign


def test_one_secret_is_made_by_many(own_cache: Path) -> None:
    assert len({marks.secret() for _ in range(3)}) == 1
    assert len(list(own_cache.iterdir())) == 1


def test_a_job_without_a_mark_is_accepted_after_a_look(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands for jobs of one's own that an older version has added."""

    def verb(*words: str) -> str:
        verbs.main(list(words), standalone_mode=False)
        return capsys.readouterr().out

    monkeypatch.chdir(tmp_path)
    write_received(tmp_path / "queue", ["touch", "was run"])
    for name in ("running", "done", "logs"):  # a folder that holds a job may hold nothing else
        (tmp_path / "queue" / name).rmdir()
    says = "`samecurve queue accept 0123456789ab` shows what it would run"
    listed = verb("list")
    assert "foreign" in listed
    assert says in listed
    with pytest.raises(SystemExit, match="1"):  # not all that waits was done
        verb("work")
    assert says in capsys.readouterr().out
    with pytest.raises(UserError, match="nobody is there") as raised:
        verb("accept", "tiny")
    assert "--yes" in raised.value.remedy
    shown = capsys.readouterr().out
    assert "touch 'was run'" in shown
    assert f"folder   {tmp_path}\n" in shown
    assert Queue(tmp_path / "queue").jobs()[0].foreign
    assert "accepted job 0123456789ab" in verb("accept", "tiny", "--yes")
    with pytest.raises(UserError, match="is marked already"):
        verb("accept", "tiny")
    verb("work")
    assert (tmp_path / "was run").exists()


def test_what_is_shown_is_made_from_what_is_run(tmp_path: Path) -> None:
    queue = Queue(tmp_path / "queue")
    own = python_module("samecurve", "train", "-f", "a b.yaml")
    assert queue.add(new(tmp_path, own)).command == "samecurve train -f 'a b.yaml'"
    here_first = [sys.executable, "-m", "samecurve", "eval", "x"]  # it searches the job's folder
    assert queue.add(new(tmp_path, here_first)).command.startswith(sys.executable)
    other = ["/tmp/python", "-m", "samecurve", "train"]
    assert queue.add(new(tmp_path, other)).command == "/tmp/python -m samecurve train"
    option = [sys.executable, "-c", "evil", "-m", "samecurve"]
    assert queue.add(new(tmp_path, option)).command.startswith(sys.executable)


@pytest.mark.parametrize("name", ["waiting", "running", "done", "logs"])
def test_a_queue_leads_nowhere_else(tmp_path: Path, name: str) -> None:
    """Folders and logs of a queue that are links: nothing is read or written through them."""
    queue = tmp_path / "received" / "queue"
    path = write_received(queue, ["true"], "done", exit=1, ended=1.0)
    outside = tmp_path / "outside"
    (queue / name).rename(outside)
    (queue / name).symlink_to(outside)
    with pytest.raises(UserError, match="is a link"):
        Queue(queue).add(new(tmp_path, ["true"]))
    before = sorted(outside.iterdir())
    Queue(queue).settle()
    assert sorted(outside.iterdir()) == before
    if name == "done":
        assert Queue(queue).jobs() == []
        assert path.exists()


def test_the_log_of_a_received_job_shows_no_other_file(tmp_path: Path) -> None:
    queue = tmp_path / "queue"
    write_received(queue, ["true"], "done", exit=1, ended=1.0)
    (tmp_path / "secret").write_text("outside of the folder")
    (queue / "logs" / "0123456789ab.log").symlink_to(tmp_path / "secret")
    (row,) = job_rows(Queue(queue), NO_RUNS)
    assert row["state"] == "failed"
    assert "log_tail" not in row


# -- code that a run or a config names

IMPORTED = """
import pathlib
pathlib.Path({mark!r}).touch()
raise SystemExit("it was imported")
"""
# where the file lies below the folder that was received, and the task that names it
PLACES = {
    "in the run": ("runs/a/evil.py", "{root}/runs/a/evil.py:Task"),
    "below the run": ("runs/a/code/evil.py", "{root}/runs/a/code/evil.py:Task"),
    "in another run": ("runs/b/evil.py", "{root}/runs/b/evil.py:Task"),
    "in the run, relative": ("runs/a/evil.py", "runs/a/evil.py:Task"),
    "a module in the run": ("runs/a/evil.py", "runs.a.evil:Task"),
    "outside, relative": ("../evil.py", "../evil.py:Task"),
    "a pickle in the run": ("runs/a/task.pickle", "{root}/runs/a/task.pickle:Task"),
    "beside the page's folder": ("../evil.py", "{root}/../evil.py:Task"),
    "a pickle in another run": ("runs/b/task.pickle", "{root}/runs/b/task.pickle:Task"),
}


def received_folder(tmp_path: Path, place: str) -> tuple[Path, str, Path]:
    """A folder with two runs and a file of code: its path, the task, the mark of the import."""
    root, mark = tmp_path / "received", tmp_path / "was-imported"
    file, task = PLACES[place]
    task = task.format(root=root)
    for name in "ab":
        make_run(root / "runs" / name, planned(run=f"runs/{name}"), step(1))
    (root / "runs" / "a" / "checkpoints").mkdir()
    (root / file).parent.mkdir(exist_ok=True)
    (root / file).write_text(IMPORTED.format(mark=str(mark)))
    for name in ("runs/a/config.yaml", "a.yaml"):
        (root / name).write_text(f"task: {task}\nbatch: {{samples: 8}}\ntrain: {{steps: 1}}\n")
    return root, task, mark


@pytest.mark.parametrize("place", PLACES)
def test_a_button_runs_no_code_that_came_with_a_run(tmp_path: Path, place: str) -> None:
    """Resume, Evaluate and Sample: the server is started elsewhere than where the paths begin."""
    root, _, mark = received_folder(tmp_path, place)
    with serving(root) as served:
        path = f"/api/runs/{served.run_id('runs/a')}"
        for action in ("resume", "evaluate", "sample"):
            answer = served.write(f"{path}/{action}")
            assert answer.status == 403, (action, answer.body)
            assert "evil" in answer.cause or "task.pickle" in answer.cause
        assert served.ask("/api/queue").json["jobs"] == []
    assert not mark.exists()


@pytest.mark.parametrize("place", PLACES)
def test_a_form_imports_no_code_that_came_with_a_run(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request about a new run, from every base that can name the class."""
    root, task, mark = received_folder(tmp_path, place)
    monkeypatch.chdir(tmp_path)  # a request changes the folder of its process
    answers = Answers(Roots.of([root]))
    listed = answers.bases({})
    bases = [{"kind": "run", "id": row["id"]} for row in listed["runs"] if row["name"] == "runs/a"]
    bases += [{"kind": "config", "id": row["id"]} for row in listed["configs"]]
    bases += [{"kind": "empty", "id": task}]
    assert len(bases) >= 3
    requests = [{"base": base} for base in bases]
    requests += [{"base": {"kind": "empty", "id": "language"}, "values": {"task": task}}]
    for request in requests:
        for ask in (answers.form, answers.save, answers.start, answers.config_text):
            with pytest.raises((UserError, RefusedError)) as raised:
                ask(request)
            assert "code" in str(raised.value), (request, str(raised.value))
        assert not answers.plan(request)["ok"]
    assert not mark.exists()


def test_a_users_own_code_is_run_from_the_page(tmp_path: Path) -> None:
    """A class beside the runs, below the page's folder, may be resumed; a lost one is named."""
    root = tmp_path / "project"
    home = make_run(root / "runs" / "a", planned(run="runs/a"), step(1))
    (root / "mine.py").write_text("class Task: ...\n")
    (home / "config.yaml").write_text("task: mine.py:Task\nbatch: {samples: 8}\n")
    with serving(root) as served:
        path = f"/api/runs/{served.run_id('runs/a')}"
        assert served.write(f"{path}/resume").status == 200
        (job,) = served.site.desk.jobs()
        assert job.cwd == root


# -- what the programs that are called read from a folder


GIT_COMMANDS = {
    "filter": {"filter.evil.clean": "{script} %f"},
    "required filter": {"filter.evil.clean": "{script} %f", "filter.evil.required": "true"},
    "process": {"filter.evil.process": "{script}"},
    "included": {"include.path": "{home}/more"},
    "fsmonitor": {"core.fsmonitor": "{script}"},
    "diff": {"diff.external": "{script}"},
    "textconv": {"diff.evil.textconv": "{script}"},
    "diff driver": {"diff.evil.command": "{script}"},
    "pager": {"core.pager": "{script}", "pager.diff": "true"},
}


@pytest.mark.parametrize("key", GIT_COMMANDS)
def test_a_received_repository_runs_no_command(
    tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run notes the commit of its folder; `.git/config` may name commands for git to run."""

    def git(*words: str) -> None:
        subprocess.run(["git", *words], cwd=tmp_path, check=True, capture_output=True)

    mark = tmp_path / "was-run"
    script = tmp_path / "evil.sh"
    script.write_text(f"#!/bin/sh\ntouch {mark}\ncat\n")
    script.chmod(0o755)
    (tmp_path / "a.txt").write_text("a\n")
    git("init", "-q")
    git("add", "a.txt")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a")
    monkeypatch.chdir(tmp_path)
    clean = _commit()
    assert len(clean) == 40
    (tmp_path / ".gitattributes").write_text("* filter=evil diff=evil\n")
    (tmp_path / "more").write_text(f'[filter "evil"]\nclean = {script} %f\n')
    for name, value in GIT_COMMANDS[key].items():
        git("config", name, value.format(script=script, home=tmp_path))
    os.utime(tmp_path / "a.txt", (1, 1))  # as after a copy of the folder: git compares contents
    assert _commit() == clean
    assert not mark.exists()
    (tmp_path / "a.txt").write_text("b\n")
    assert _commit() == f"{clean}-dirty"
    git("config", "filter.a=b.clean", str(script))  # no word for a command line
    assert _commit() == ""
    assert not mark.exists()
