"""`samecurve run`: scripts run as they are; whatever goes wrong, nothing stays behind, and the
cause is told once.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from commands import command, refused, samecurve, until
from samecurve.launch.script.announcements import WatchAnnouncement
from samecurve.launch.script.output import Lines
from samecurve.launch.script.placement import reserve_port
from samecurve.watch import HangLimit

SCRIPTS = Path(__file__).with_name("scripts")
FAULTS = SCRIPTS / "goes_wrong.py"


@contextmanager
def running(home: Path, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A live `samecurve run --nproc 2 ...`, in a session of its own, with SIGINT as a terminal
    leaves it. Afterwards nothing may be left of it.
    """
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        command("run", *arguments),
        cwd=home,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()
    until(lambda: not left(home), timeout=2)


def left(home: Path) -> list[int]:
    """Live processes that were started in this directory."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if (
                Path(process.cwd()) == home
                and process.status() != psutil.STATUS_ZOMBIE
                and process.pid != os.getpid()
            ):
                found.append(process.pid)
    return found


def run(home: Path, *arguments: object, code: int = 0) -> tuple[str, str]:
    """To its end, with two ranks. Returns what stood on the screen: stdout, stderr."""
    with running(home, "--nproc", 2, "--log-dir", "logs", *arguments) as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    if code:
        assert len(re.findall("^error: ", err, re.MULTILINE)) == 1
        assert out.count("Traceback") == 0
        assert err.count("Traceback") <= 1
        assert err.rindex("error: ") > err.rfind("[rank ")  # the cause is the last thing said
    return out, err


def log(home: Path, rank: int) -> str:
    return (home / f"logs/rank-{rank}.log").read_text()


def wait_for(home: Path, text: str, ranks: int = 2) -> None:
    until(
        lambda: all(
            (home / f"logs/rank-{rank}.log").is_file() and text in log(home, rank)
            for rank in range(ranks)
        ),
        timeout=60,
    )


@pytest.mark.long
def test_a_ddp_script_runs_as_it_is_twice_at_once(tmp_path: Path) -> None:
    """The ranks of each run meet over the port that was held for them, and agree on the weights."""
    homes = [tmp_path / "one", tmp_path / "two"]
    for home in homes:
        home.mkdir()
    with (
        running(homes[0], "--nproc", 2, SCRIPTS / "ddp.py") as one,
        running(homes[1], "--nproc", 2, SCRIPTS / "ddp.py") as two,
    ):
        said = [live.communicate(timeout=100) for live in (one, two)]
    for out, err in said:
        weights = re.findall(r"^\[rank (\d)\] rank (\d) of 2: weight (\S+)$", out, re.MULTILINE)
        assert sorted(rank for rank, _, _ in weights) == ["0", "1"], err
        assert all(prefix == rank for prefix, rank, _ in weights)
        assert len({weight for _, _, weight in weights}) == 1
        assert "warn" not in err
        assert "no GPU found" in err
    assert len({err.partition("they meet at ")[2].partition("\n")[0] for _, err in said}) == 2


def test_ranks_that_never_meet_are_told_once(tmp_path: Path) -> None:
    out, err = run(tmp_path, SCRIPTS / "alone.py")
    assert out.count("trained 332833500\n") == 2
    assert err.count("none of the 2 ranks has joined a process group") == 1
    assert "samecurve run --nproc 1" in err


def test_an_old_script_is_given_its_local_rank(tmp_path: Path) -> None:
    """In the spelling of its own parser, before the script's own options."""
    out, err = run(tmp_path, SCRIPTS / "local_rank.py", "--lr", "0.5")
    assert sorted(out.splitlines()) == [
        f"[rank {rank}] local rank {rank}, lr 0.5" for rank in (0, 1)
    ]
    assert "--local_rank=N" in err


@pytest.mark.parametrize(
    ("how", "code", "says"),
    [
        ("raise", 1, "ValueError: a planted fault"),
        ("hanging", 1, "ValueError: a planted fault"),
        *(
            pytest.param(*one, marks=pytest.mark.long)
            for one in (
                ("import", 1, "ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
                ("exit", 3, f"rank 1 left by sys.exit(3), at {FAULTS}:"),
                ("text", 1, "rank 1: a planted word"),
                ("interrupt", 130, "KeyboardInterrupt"),
            )
        ),
    ],
)
def test_a_rank_that_fails_ends_the_run(how: str, code: int, says: str, tmp_path: Path) -> None:
    """With its own exit code, within the grace, though the others sleep and it may hang in its own
    exit.
    """
    began = time.monotonic()
    _, err = run(tmp_path, FAULTS, how, 1, code=code)
    assert time.monotonic() - began < 10
    assert says in err[err.index("error: ") :]
    assert "bootstrap.py" not in err + log(tmp_path, 1)
    if how in {"raise", "import"}:
        assert log(tmp_path, 1).startswith("here 1\nTraceback (most recent call last):\n  File")
        assert log(tmp_path, 1).count(says) == 1


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)]
)
def test_a_rank_that_is_killed_ends_the_run(number: int, tmp_path: Path) -> None:
    with running(tmp_path, "--nproc", 2, "--log-dir", "logs", FAULTS, "child", 1) as live:
        wait_for(tmp_path, "child ")
        os.kill(
            next(
                process.pid
                for process in psutil.process_iter()
                if str(tmp_path / "logs/rank-1.json") in _line(process)
            ),
            number,
        )
        _, err = live.communicate(timeout=30)
    assert live.returncode == 128 + number
    assert err.count("error: ") == 1
    assert "rank 1 " in err[err.index("error: ") :]


def _line(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return process.cmdline()
    return []


def test_nothing_outlives_a_killed_launcher(tmp_path: Path) -> None:
    """Nor data workers, which know nothing of it."""
    with running(tmp_path, "--nproc", 1, "--log-dir", "logs", FAULTS, "loader", 1) as live:
        wait_for(tmp_path, "worker", ranks=1)
        assert len(left(tmp_path)) >= 4  # launcher, guard, rank, worker
        live.kill()
        until(lambda: not left(tmp_path), timeout=2)


def test_children_that_ignore_it_die_too(tmp_path: Path) -> None:
    with running(tmp_path, "--nproc", 2, "--log-dir", "logs", FAULTS, "child", 1) as live:
        wait_for(tmp_path, "child ")
        live.kill()
        until(lambda: not left(tmp_path), timeout=2)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_passed_on_once(number: int, code: int, tmp_path: Path) -> None:
    """Ctrl-C: a script may save and leave in order; the exit code is the signal's all the same.

    SIGTERM ends what does not catch it.
    """
    with running(tmp_path, "--nproc", 2, "--log-dir", "logs", FAULTS, "saving", 1) as live:
        wait_for(tmp_path, "here")
        time.sleep(0.3)
        live.send_signal(number)
        out, err = live.communicate(timeout=20)
    assert live.returncode == code
    assert out.count("saved ") == (2 if number == signal.SIGINT else 0)
    assert err.count("passed on to all ranks") == 1
    assert "error" not in err


def test_a_second_one_kills(tmp_path: Path) -> None:
    with running(tmp_path, "--nproc", 2, "--log-dir", "logs", FAULTS, "deaf", 1) as live:
        wait_for(tmp_path, "deaf")
        live.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert live.poll() is None
        live.send_signal(signal.SIGINT)
        live.communicate(timeout=3)
    assert live.returncode == 130


def test_started_anew_after_a_failure(tmp_path: Path) -> None:
    """Each attempt has its own port and logs."""
    _, err = run(tmp_path, "--max-restarts", 2, FAULTS, "once", 1)
    assert "restart 1 of 2" in err
    assert "ValueError: a planted fault" in err
    assert "ValueError: a planted fault" in (tmp_path / "logs/rank-1.attempt-0.log").read_text()
    assert "Traceback" not in log(tmp_path, 1)
    assert "error: " not in err


@pytest.mark.parametrize("module", [False, True])
def test_a_script_sees_what_plain_python_shows_it(*, module: bool, tmp_path: Path) -> None:
    target = ["-m", "whoami"] if module else [str(SCRIPTS / "whoami.py")]
    cwd = SCRIPTS if module else tmp_path
    plain = subprocess.run(
        [sys.executable, *target, "a", "-m", "--x"],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    done = subprocess.run(
        command("run", "--log-dir", tmp_path / "logs", *target, "a", "-m", "--x"),
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain
    assert "1 rank on the CPU: no GPU found; --nproc N starts N" in done.stderr


def test_lines_stay_whole(tmp_path: Path) -> None:
    """Of two ranks that print in pieces, as fast as they can; the log holds all bytes."""
    script = tmp_path / "talk.py"
    script.write_text(
        "import os, sys\nfor i in range(3000):\n    os.write(1, b'x' * (i % 500)); os.write(1,"
        " b'%d\\n' % i)\n    sys.stderr.write(f'\\r{i}#' + '\\n' * (i == 2999))\n"
    )
    out, err = run(tmp_path, script)
    lines = out.splitlines()
    assert len(lines) == 6000
    assert all(re.fullmatch(r"\[rank [01]\] x*\d+", line) for line in lines)
    assert [line for line in lines if line.startswith("[rank 1]")] == [
        f"[rank 1] {'x' * (i % 500)}{i}" for i in range(3000)
    ]
    assert err.count("[rank 0] ") == 1
    assert "[rank 0] 2999#\n" in err
    kept = (tmp_path / "logs/rank-0.log").read_bytes()
    assert kept.count(b"\r") == 3000
    rest = re.sub(rb"\r\d+#", b"", kept)
    assert sorted(rest.split(b"\n"), key=len) == sorted(
        [b"", b"", *(b"x" * (i % 500) + b"%d" % i for i in range(3000))], key=len
    )


def test_the_first_ranks_bytes_or_none(tmp_path: Path) -> None:
    script = tmp_path / "bar.py"
    script.write_text("import os\nos.write(1, b'\\r50%\\r100%' + os.environ['RANK'].encode())\n")
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    for output, expected in (("first", b"\r50%\r100%0"), ("files", b"")):
        done = subprocess.run(
            command("run", "--nproc", 2, "--output", output, "--log-dir", "logs", script),
            cwd=tmp_path,
            capture_output=True,
            env=environment,
            check=True,
        )
        assert done.stdout == expected
        assert (tmp_path / "logs/rank-1.log").read_bytes() == b"\r50%\r100%1"
        assert re.search(rb"^env .*; as you set it: .*PYTHONHASHSEED=7", done.stderr, re.MULTILINE)


def test_a_full_disk_ends_a_log_and_not_the_run(tmp_path: Path) -> None:
    """Files of at most 8 KiB; the screen is a pipe. One rank prints line by line, the other all at
    once, of which the disk takes a part without an error.
    """
    script = tmp_path / "long.py"
    script.write_text(
        "import os\n"
        "lines = [f'line {i}\\n' for i in range(3000)]\n"
        "if os.environ['RANK'] == '1':\n"
        "    lines = [''.join(lines)]\n"
        "for line in lines:\n"
        "    print(line, end='', flush=True)\n"
    )
    limited = [
        "bash",
        "-c",
        'ulimit -f 8; exec "$@"',
        "bash",
        *command("run", "--nproc", 2, "--log-dir", "logs", script),
    ]
    done = subprocess.run(
        limited,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 6000
    assert done.stderr.count("ends early: File too large") == 2


def test_lines_of_bars() -> None:
    lines = Lines(b"> ")
    assert lines.feed(b"a\r\n\r 1%\r 50%") == b"> a\n"
    assert lines.feed(b"\r100%\nrest") == b"> 100%\n"
    assert lines.feed(b" of it\r") == b""
    assert lines.end() == b"> rest of it\n"
    assert lines.end() == b""
    assert lines.feed(b"y" * (1 << 20 | 1)).endswith(b"y\n")


def test_a_held_port_is_nobody_elses() -> None:
    """But the store of the first rank, which reuses addresses, may listen on it."""
    with reserve_port() as held, socket.socket() as store, socket.socket() as other:
        port = held.getsockname()[1]
        store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        store.bind(("", port))
        store.listen()
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        taken = []
        for _ in range(200):
            taken.append(reserve_port())
        assert port not in {each.getsockname()[1] for each in taken}
        for each in taken:
            each.close()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "Missing argument 'SCRIPT'"),
        (["none.py"], "none.py does not exist"),
        (["."], ". is a directory"),
        (["--nproc", 0, FAULTS], "--nproc 0"),
        (["--gpus", 0, FAULTS], "GPU 0 does not exist; no GPU was found"),
        (["--gpus", 0, "--nproc", 1, FAULTS], "both say how many"),
        (["--nproc", "two", FAULTS], "'two' is not a number of ranks"),
        (["--log-dir", FAULTS, FAULTS], "can't be made"),
        (["--frobnicate", FAULTS], "No such option"),
    ],
)
def test_wrong_input_is_refused(
    arguments: list[object],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    assert says in refused(monkeypatch, capsys, "run", *arguments, cwd=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_line_for_torchrun_starts_the_same(tmp_path: Path) -> None:
    words = ["--standalone", "--nnodes=1", "--nproc_per_node=2", "--master_port=29500"]
    (tmp_path / "see.py").write_text("import os\nprint(os.environ['WORLD_SIZE'])\n")
    done = samecurve("run", *words, "see.py", cwd=tmp_path)
    assert done.stdout.count("] 2\n") == 2
    assert "note   --master-port 29500 is not used: each run takes a free port" in done.stderr
    for flag in ("--nnodes=2", "--rdzv_endpoint=a:1", "--node_rank=1"):
        refused = samecurve("run", flag, "see.py", cwd=tmp_path, code=2)
        assert "torchrun --nnodes N --rdzv-endpoint HOST:PORT SCRIPT" in refused.stderr


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("TORCHELASTIC_RUN_ID", "x", "started by torchrun"),
        ("SLURM_STEP_NUM_TASKS", "4", "started by srun"),
        ("OMPI_COMM_WORLD_SIZE", "2", "started by mpirun"),
        ("RANK", "1", "RANK=1 is set already"),
    ],
)
def test_a_launch_inside_a_launch_is_refused(
    *,
    name: str,
    value: str,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setenv(name, value)
    assert says in refused(monkeypatch, capsys, "run", FAULTS, cwd=tmp_path)


def test_nothing_heavy_is_imported_to_start() -> None:
    program = (
        "import sys, samecurve.cli.main, samecurve.launch.script.script_run\nprint({'torch', 'jax',"
        " 'numpy', 'pydantic', 'rich', 'asyncio'} & set(sys.modules))"
    )
    heavy = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert heavy.strip() == "set()"


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "says"),
    [
        (
            "sleep",
            (
                r"rank 1 gave no sign for \d+ s \(limit \d+ s\): rank 0 in all_reduce \(since"
                r" collective 21\); rank 1 in waits\.py:\d+ <module>\(\) \(since collective 20\)"
            ),
        ),
        pytest.param(
            "stop",
            r"rank 1 stopped \(SIGSTOP, or a terminal's Ctrl-Z\) for \d+ s: rank 0 in all_reduce",
        ),
    ],
)
def test_a_rank_that_hangs_is_named_by_its_collectives(how: str, says: str, tmp_path: Path) -> None:
    """And where it is killed and all start anew, the script ends as if nothing had been."""
    out, err = run(tmp_path, "--hang-floor", 3, "--max-restarts", 1, SCRIPTS / "waits.py", how)
    assert sorted(out.splitlines()) == [f"[rank {rank}] rank {rank} summed 2" for rank in (0, 1)]
    assert err.count("watch  crashes, and hangs by the ranks' collectives") == 1
    assert (
        len(
            re.findall(
                f"^again  {says}.*; all ranks start anew: restart 1 of 1$", err, re.MULTILINE
            )
        )
        == 1
    )


def test_ranks_that_give_one_collective_different_shapes_are_not_started_again(
    tmp_path: Path,
) -> None:
    """The same would happen.

    Gloo aborts (134) or waits for ever, as it comes: then the watch compares what its recorder has.
    """
    with running(
        tmp_path,
        "--nproc",
        2,
        "--log-dir",
        "logs",
        "--hang-floor",
        3,
        "--max-restarts",
        3,
        SCRIPTS / "waits.py",
        "shapes",
    ) as live:
        _, err = live.communicate(timeout=60)
    assert live.returncode in {1, 134}
    told = err[err.index("error: ") :]
    assert (
        "tensors of different sizes"
        if "rank 1: " in told
        else "rank 0 in all_reduce number 20 of [[10]]; rank 1 in all_reduce number 20 of [[7]]"
    ) in told
    assert err.count("not started again: the same would happen") == 1
    assert len(told.splitlines()) <= 10


def test_a_rank_that_takes_fewer_steps_is_the_cause(tmp_path: Path) -> None:
    """It leaves with 0, the other loses it: a loader of unequal length."""
    _, err = run(tmp_path, SCRIPTS / "waits.py", "few", code=1)
    assert (
        "error: rank 1 left with exit code 0 before the others were done\n  others: rank 0 " in err
    )


@pytest.mark.long
def test_a_rank_that_stays_behind_is_told_with_where_it_is(tmp_path: Path) -> None:
    """After ten seconds; and ended after what the line on the watch says."""
    _, err = run(tmp_path, "--hang-floor", 12, SCRIPTS / "waits.py", "behind", code=75)
    where = r"rank 1 in waits\.py:\d+ <module>\(\)"
    assert re.search(r"^watch  crashes, and hangs .* for 12 s .*; 120 s, until it is", err, re.M)
    assert re.search(
        rf"^watch  rank 0 left with exit code 0 10 s ago; still at work: {where}", err, re.M
    )
    assert re.search(
        "^error: rank 0 left with exit code 0 before the others were done, which have made no"
        rf" progress for \d+ s \(limit \d+ s\): {where}",
        err,
        re.M,
    )


def test_a_watch_that_has_not_seen_all_ranks_says_so_and_what_it_sees_later() -> None:
    lines: list[str] = []
    announcement = WatchAnnouncement(HangLimit(4, unknown=40), lines.append, long=0.0)
    announcement.tick(all_seen=False)
    announcement.tick(all_seen=False)
    announcement.tick(all_seen=True)
    announcement.tick(all_seen=True)
    assert [line.partition(",")[0] for line in lines] == ["crashes only", "crashes"]
    assert "none for 4 s (--hang-floor)" in lines[1]
    assert "40 s, until it is known what is usual" in lines[1]


ASKS = """
import os
import time
from pathlib import Path

rank = os.environ["RANK"]
if rank == os.environ["ASKED"]:
    print("hello", input("name? "), flush=True)
    Path("data.txt").read_text()
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("0", "no file data.txt in the directory where the command was typed"),
        ("1", "asks for input where nobody can type"),
    ],
)
def test_the_first_rank_is_typed_to(asked: str, says: str, tmp_path: Path) -> None:
    """And what a script expects beside it is told by where it was looked for."""
    (tmp_path / "asks.py").write_text(ASKS)
    out = subprocess.run(
        command("run", "--nproc", 2, "asks.py"),
        cwd=tmp_path,
        env={**os.environ, "ASKED": asked},
        input="Ada\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert out.returncode == 1
    assert ("hello Ada" in out.stdout) == (asked == "0")
    assert says in out.stderr[out.stderr.index("error: ") :]
