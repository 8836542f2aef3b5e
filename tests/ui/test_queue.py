"""The queue of jobs: order, devices, restarts, kills. Jobs are small commands, one a real run."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from serving import make_run, planned, step

from commands import samecurve, write_config
from samecurve.cli.main import cli
from samecurve.errors import UserError
from samecurve.run.directory import Lock, Run
from samecurve_products.page.jobs.busy import Devices, device_words, devices_of, runs_below
from samecurve_products.page.jobs.desk import Desk, JobCommand
from samecurve_products.page.jobs.job import Folder, Job
from samecurve_products.page.jobs.processes import ProcessName
from samecurve_products.page.jobs.queue import NewJob, Queue, job_rows
from samecurve_products.page.jobs.work import WorkerThread, has_worker, work, working
from samecurve_products.page.roots import Catalogue, Root

CPU = ("cpu",)
NO_RUNS = Devices(list)
PATIENCE = 20.0  # seconds


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def waits_for(path: Path) -> str:
    """Code that runs until a file is there."""
    return f"import os, time\nwhile not os.path.exists({str(path)!r}): time.sleep(0.02)"


def new(home: Path, name: str, code: str = "", devices: tuple[str, ...] = CPU) -> NewJob:
    return NewJob(name=name, argv=python(code), cwd=home, devices=devices)


def until(condition: Callable[[], bool], what: str = "") -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def states(queue: Queue) -> dict[str, str]:
    return {job.name: job.outcome().state for job in queue.jobs()}


def command_of(job: Job) -> int:
    """The process of a job's command, a child of its shepherd."""
    shepherd = read(job).process
    assert shepherd is not None
    path = Path(f"/proc/{shepherd.pid}/task/{shepherd.pid}/children")
    until(lambda: bool(path.read_text().split()))
    return int(path.read_text().split()[0])


def read(job: Job) -> Job:
    """The job as its file has it by now."""
    queue = Queue(job.log.parents[1])
    until(lambda: queue.find(job.id).process is not None, "the shepherd has written its name")
    return queue.find(job.id)


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    queue = Queue(tmp_path / "queue")
    yield queue
    (tmp_path / "go").touch()  # jobs that wait for it end
    until(lambda: not {"running", "starting"} & set(states(queue).values()))
    queue.settle()


def test_jobs_run_in_order_on_their_devices(queue: Queue, tmp_path: Path) -> None:
    """A job waits for its devices, and takes none that an earlier job waits for."""
    go = tmp_path / "go"
    both = ("cuda:0", "cuda:1")
    queue.add(new(tmp_path, "first", waits_for(go), ("cuda:0",)))
    queue.add(new(tmp_path, "wide", "", both))
    queue.add(new(tmp_path, "narrow", "", ("cuda:1",)))
    queue.add(new(tmp_path, "other", waits_for(go), CPU))
    begun = [job.name for job in queue.start_next(NO_RUNS)]
    assert begun == ["first", "other"]
    why = {row["name"]: row.get("why", "") for row in job_rows(queue, NO_RUNS)}
    assert why["wide"] == "waits for GPU 0 (job first uses it)"
    assert why["narrow"] == "waits for GPU 1 (job wide, which comes first)"
    assert queue.start_next(NO_RUNS) == []
    go.touch()
    began = []
    with working(queue, "a test"):
        failed = work(queue, NO_RUNS, say=lambda what, job: began.append((what, job.name)))
    assert failed == 0
    assert [name for what, name in began if what == "started"] == ["wide", "narrow"]
    assert set(states(queue).values()) == {"finished"}


def test_runs_that_are_added_at_once_have_names_of_their_own(queue: Queue, tmp_path: Path) -> None:
    def add(_number: int) -> None:
        with queue.held():
            run = tmp_path / "runs" / queue.free_run("twin", tmp_path / "runs")
            queue.add(replace(new(tmp_path, "twin"), run=run))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(add, range(16)))
    assert len({job.run for job in queue.jobs()}) == 16


@pytest.mark.long
def test_a_run_is_resumed_once_at_a_time(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a"
    desk = Desk(Catalogue([Root.of(tmp_path)]))
    queue = Queue(tmp_path / "queue")
    queue.start(replace(new(tmp_path, "first", waits_for(tmp_path / "go")), run=run))
    command = JobCommand(["plan", "--help"], "resume a", tmp_path, "cpu", run)
    with pytest.raises(UserError, match="goes on, or waits"):
        desk.start_command(command)
    (tmp_path / "go").touch()
    until(lambda: states(queue) == {"first": "finished"})
    assert desk.start_command(command)["name"] == "resume a"
    until(lambda: states(queue)["resume a"] == "finished")


def test_moving_and_removing(queue: Queue, tmp_path: Path) -> None:
    for name in "xyz":  # no id begins with one of them
        queue.add(new(tmp_path, name))
    queue.move(queue.find("z"), "up")
    queue.move(queue.find("x"), "up")  # it is the first already
    queue.move(queue.find("x"), "down")
    assert [job.name for job in queue.jobs()] == ["z", "x", "y"]
    queue.remove(queue.find("x"))
    assert [job.name for job in queue.jobs()] == ["z", "y"]
    with pytest.raises(UserError, match="no job x"):
        queue.find("x")
    running = queue.start(new(tmp_path, "now", waits_for(tmp_path / "go")))
    with pytest.raises(UserError, match="would not stop it"):
        queue.remove(read(running))
    with pytest.raises(UserError, match="does not wait"):
        queue.move(running, "up")


def test_a_job_that_moves_while_it_is_listed_is_listed_once(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = queue.add(new(tmp_path, "moves"))
    read_folder = Queue._in

    def reading(self: Queue, folder: Folder) -> list[Job]:
        jobs = read_folder(self, folder)
        self._claim(job)
        return jobs

    monkeypatch.setattr(Queue, "_in", reading)
    (listed,) = queue.jobs()
    assert listed.folder == "running"
    listed.path.unlink()  # nothing has started it


@pytest.mark.long
def test_outcomes(queue: Queue, tmp_path: Path) -> None:
    """Success, an exit code, a signal, a stop, and a command that is not there."""
    codes = {
        "good": "print('it went well')",
        "bad": "import sys; print('CUDA out of memory'); sys.exit(3)",
        "stopped": "import sys; sys.exit(130)",
        "killed": "import os; os.kill(os.getpid(), 9)",
    }
    for name, code in codes.items():
        queue.add(new(tmp_path, name, code, (f"cuda:{name}",)))
    missing = NewJob(name="missing", argv=["/no/such"], cwd=tmp_path, devices=())
    nowhere = NewJob(name="nowhere", argv=["true"], cwd=tmp_path / "gone", devices=())
    for job in (missing, nowhere):
        queue.add(job)
    with working(queue, "a test"):
        assert work(queue, NO_RUNS) == 4
    rows = {row["name"]: row for row in job_rows(queue, NO_RUNS)}
    assert {name: row["state"] for name, row in rows.items()} == {
        "good": "finished",
        "bad": "failed",
        "stopped": "stopped",
        "killed": "failed",
        "missing": "failed",
        "nowhere": "failed",
    }
    assert rows["bad"]["why"] == "it ended with exit code 3"
    assert "CUDA out of memory" in rows["bad"]["log_tail"]
    assert rows["killed"]["why"] == "it was ended by signal 9"
    assert "can't be started" in rows["missing"]["log_tail"]
    assert "can't be started" in rows["nowhere"]["log_tail"]
    assert "log_tail" not in rows["good"]


def test_a_stopped_job_stays_stopped_when_its_run_is_deleted(queue: Queue, tmp_path: Path) -> None:
    """Its command ends with 0, as that of a finished job does: the run's journal knows more."""
    lines = {"stopped": {"kind": "stopped"}, "finished": {"kind": "finished"}}
    for name, line in lines.items():
        run = make_run(tmp_path / name, planned(), step(1), line)
        queue.start(replace(new(tmp_path, name), run=run))
    until(lambda: states(queue) == {name: name for name in lines})
    for name in lines:
        shutil.rmtree(tmp_path / name)
    assert states(queue) == {name: name for name in lines}


def test_a_worker_that_is_killed_loses_no_job(queue: Queue, tmp_path: Path) -> None:
    """The next worker finds the job that runs, and starts the one that waits after it."""
    go = tmp_path / "go"
    first = queue.add(new(tmp_path, "first", waits_for(go)))
    queue.add(new(tmp_path, "second", f"assert __import__('os').path.exists({str(go)!r})"))
    code = (
        "from pathlib import Path\n"
        "from samecurve_products.page.jobs.busy import Devices\n"
        "from samecurve_products.page.jobs.queue import Queue\n"
        "from samecurve_products.page.jobs.work import work, working\n"
        f"queue = Queue(Path({str(queue.home)!r}))\n"
        "with working(queue, 'the first worker'):\n"
        "    work(queue, Devices(list), forever=True)\n"
    )
    worker = subprocess.Popen([sys.executable, "-c", code])
    try:
        process = command_of(first)
        held = f"the first worker, process {worker.pid}"
        with pytest.raises(UserError, match=held), working(queue, "another"):
            pass
        assert has_worker(queue)
        worker.kill()
    finally:
        worker.kill()
        worker.wait()
    assert not has_worker(queue)
    os.kill(process, 0)  # the job lives
    assert states(queue) == {"first": "running", "second": "waiting"}
    with working(queue, "the next one"):
        assert Queue(queue.home).start_next(NO_RUNS) == []
        go.touch()
        assert work(queue, NO_RUNS) == 0
    assert states(queue) == {"first": "finished", "second": "finished"}


def test_what_a_kill_leaves_is_told(queue: Queue, tmp_path: Path) -> None:
    """A shepherd and its command that were killed, and a worker that had not started its job."""
    job = read(queue.start(new(tmp_path, "lost", waits_for(tmp_path / "never"))))
    command = command_of(job)
    assert job.process is not None
    os.kill(job.process.pid, signal.SIGKILL)
    os.kill(command, signal.SIGKILL)
    until(lambda: states(queue)["lost"] == "failed")
    assert "without a word" in queue.find("lost").outcome().why
    gone = subprocess.Popen(["true"])
    gone.wait()
    waiting = queue.add(new(tmp_path, "never", ""))
    values = {**waiting.to_json(), "starter": {"pid": gone.pid, "began": "long ago"}}
    waiting.path.unlink()
    (queue.home / "running" / waiting.file_name).write_text(json.dumps(values))
    assert states(queue)["never"] == "failed"
    assert "not started" in queue.find("never").outcome().why
    (queue.home / "waiting" / "torn.json").write_text('{"id": ')
    (queue.home / "waiting" / "other.json").write_text("[]")
    queue.settle()
    assert {job.name: job.folder for job in queue.jobs()} == {"lost": "done", "never": "done"}


def test_another_process_with_the_same_number_is_not_taken_for_the_job() -> None:
    own = ProcessName.own()
    assert own.is_alive
    assert not ProcessName(own.pid, "another boot 1").is_alive
    assert ProcessName.of_json(own.to_json()) == own
    for value in (None, {}, {"pid": "1", "began": ""}, {"pid": 1, "began": "x"}, [1]):
        assert ProcessName.of_json(value) is None


def test_a_live_run_keeps_its_devices(queue: Queue, tmp_path: Path) -> None:
    """Runs that somebody has started on the command line are waited for."""
    home = tmp_path / "runs" / "by-hand"
    home.mkdir(parents=True)
    devices = [{"kind": "cuda", "index": 1}, {"kind": "cuda", "index": 2}]
    (home / "plan.json").write_text(json.dumps({"plan": {"devices": devices}}))
    assert devices_of(home) == ["cuda:1", "cuda:2"]
    here = Devices(runs_below(tmp_path))
    queue.add(new(tmp_path, "next", "", ("cuda:2",)))
    lock = Lock(Run(home))
    try:
        assert queue.start_next(here) == []
        (row,) = job_rows(queue, here)
        assert row["why"] == "waits for GPU 2 (run by-hand uses it)"
    finally:
        lock.release()
    assert [job.name for job in queue.start_next(here)] == ["next"]


def test_the_servers_thread_works_on_the_queue(queue: Queue, tmp_path: Path) -> None:
    """It takes over from another worker, and leaves jobs running when it ends."""
    thread = WorkerThread(queue, NO_RUNS)
    queue.add(new(tmp_path, "one", waits_for(tmp_path / "go")))
    thread.start()
    until(lambda: states(queue) == {"one": "running"})
    thread.stop()
    assert states(queue) == {"one": "running"}
    assert not has_worker(queue)


def test_a_directory_that_is_no_queue_is_refused(tmp_path: Path) -> None:
    (tmp_path / "queue").mkdir()
    (tmp_path / "queue" / "notes.txt").touch()
    with pytest.raises(UserError, match="no queue"):
        Queue(tmp_path / "queue")
    assert device_words(["cuda:0", "cuda:3", "cpu"]) == "GPU 0, 3 and the CPU"


def test_the_verb_checks_queues_and_runs(tmp_path: Path, corpus: Path) -> None:
    """One real run, through add, list, work and the signal that ends the worker."""
    shutil.copy(corpus, tmp_path / "squares.txt")
    write_config(tmp_path, tmp_path / "squares.txt", steps=3)
    refused = samecurve("queue", "add", "-f", "tiny.yaml", "--lr", -1, cwd=tmp_path, code=2)
    assert "optimizer.lr" in refused.stderr
    assert not (tmp_path / "queue" / "waiting").exists()
    added = samecurve(
        "queue", "add", "-f", "tiny.yaml", "--devices", "cpu", "--max-steps", 2, cwd=tmp_path
    )
    assert "nothing works on this queue" in added.stdout
    listed = json.loads(samecurve("queue", "list", "--json", cwd=tmp_path).stdout)
    assert listed["paused"]
    (job,) = listed["jobs"]
    assert (job["name"], job["state"], job["devices"]) == ("tiny", "waiting", "the CPU")
    assert job["command"].startswith("samecurve train -f tiny.yaml --devices cpu --max-steps 2")
    worked = samecurve("queue", "work", cwd=tmp_path)
    assert [line.split()[0] for line in worked.stdout.splitlines()] == ["started", "finished"]
    assert Run(Path(job["run"])).results.exists()
    (tmp_path / "queue" / "running" / "x").touch()
    samecurve("queue", "remove", job["id"], cwd=tmp_path)
    assert "has no job" in samecurve("queue", "list", cwd=tmp_path).stdout


def test_ctrl_c_leaves_the_jobs_running(queue: Queue, tmp_path: Path) -> None:
    job = queue.add(new(tmp_path, "long", waits_for(tmp_path / "go")))
    worker = subprocess.Popen(
        [sys.executable, "-m", "samecurve", "queue", "work"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    command = command_of(job)
    os.kill(worker.pid, signal.SIGINT)
    _, said = worker.communicate(timeout=PATIENCE)
    assert worker.returncode == 130
    assert "jobs that run go on" in said
    os.kill(command, 0)


def test_the_verb_has_its_five_verbs() -> None:
    context = cli.make_context("samecurve", ["queue"], resilient_parsing=True)
    group = cli.get_command(context, "queue")
    assert sorted(getattr(group, "commands", {})) == ["accept", "add", "list", "remove", "work"]
