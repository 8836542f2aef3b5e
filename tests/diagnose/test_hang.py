"""Who is taken for hung, and who is named: rules on heartbeats and on snapshots of the ranks."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from samecurve.core.events import Activity, Beat
from samecurve.watch import HangLimit, flight_recorder
from samecurve.watch.hang_watch import current_collective
from samecurve.watch.silence import Silence, SilenceWatch
from samecurve.watch.stacks import Location, locate
from samecurve.watch.verdict import Collective, RankSnapshot, judge

INTERVAL = 0.2


def silent_after(watch: SilenceWatch, at: float, beats: dict[int, Beat]) -> float:
    """Seconds after `at` until the watch says that somebody hangs."""
    now = at
    while watch.observe(now, beats, INTERVAL) is None:
        now += INTERVAL
        assert now < at + 10_000
    return now - at


def trained(watch: SilenceWatch, ranks: int, steps: int, seconds: float) -> float:
    """Steps in which every rank beats twice. Returns when they ended."""
    now = 0.0
    for count in range(2 * steps):
        activity: Activity = "step" if count % 2 else "data"
        beats = {rank: Beat((count + 1) // 2, activity, count) for rank in range(ranks)}
        until = now + seconds / 2
        while now < until:
            assert watch.observe(now, beats, INTERVAL) is None
            now += min(INTERVAL, seconds / 2)
    return now


@pytest.mark.parametrize(("seconds", "limit"), [(0.01, 20), (1.0, 20), (40.0, 200)])
def test_the_limit_is_learnt_from_the_ranks_own_steps(seconds: float, limit: float) -> None:
    """Quick steps: the floor. Slow ones: ten times their usual length."""
    watch = SilenceWatch(HangLimit(20))
    now = trained(watch, 2, 20, seconds)
    seconds = silent_after(watch, now, {0: Beat(21, "step", 1000), 1: Beat(20, "data", 1000)})
    assert limit <= seconds <= limit * 1.1 + INTERVAL


def test_what_was_never_seen_to_end_has_ten_times_the_floor() -> None:
    watch = SilenceWatch(HangLimit(20))
    assert silent_after(watch, 0, {0: Beat(0, "start", 0)}) == pytest.approx(200, abs=1)
    now = 1000.0
    first_step = {0: Beat(0, "step", 1)}  # it may be compiled
    assert silent_after(watch, now, first_step) == pytest.approx(200, abs=1)


def test_only_the_rank_furthest_behind_is_asked() -> None:
    """Rank 0 saves, which may take long; the others wait for it in the next step."""
    watch = SilenceWatch(HangLimit(20))
    now = trained(watch, 2, 20, 0.1)
    beats = {0: Beat(20, "save", 1000), 1: Beat(20, "step", 1000)}
    assert silent_after(watch, now, beats) == pytest.approx(200, abs=1)


def test_a_watch_that_was_asleep_blames_nobody() -> None:
    watch = SilenceWatch(HangLimit(20))
    now = trained(watch, 2, 20, 0.1)
    beats = {0: Beat(20, "step", 1000), 1: Beat(20, "step", 1000)}
    assert watch.observe(now, beats, INTERVAL) is None
    assert watch.observe(now + 3600, beats, INTERVAL) is None  # the machine was suspended
    assert silent_after(watch, now + 3600, beats) == pytest.approx(20, abs=2)


IN_SUM = Collective(7, "all_reduce", "[[10]]", ended=False)
SUMMED = Collective(7, "all_reduce", "[[10]]", ended=True)
BEFORE = Collective(6, "all_reduce", "[[10]]", ended=True)
IN_BROADCAST = Collective(7, "broadcast", "[[10]]", ended=False)
STEP_9, DATA_9 = Beat(9, "step", 1), Beat(9, "data", 1)
WAITING = RankSnapshot(STEP_9, collective=IN_SUM)
IN_LOSS = Location("other", "mine.py:8 loss()")
IN_FEED = Location("data", "the feed: mine.py:3 read()")


@pytest.mark.parametrize(
    ("snapshots", "culprits", "says"),
    [
        (
            {0: WAITING, 1: RankSnapshot(STEP_9, process_state="T"), 2: WAITING},
            (1,),
            "rank 1 stopped (SIGSTOP",
        ),
        (
            {0: WAITING, 1: RankSnapshot(DATA_9, location=IN_FEED, collective=BEFORE)},
            (1,),
            "rank 1 in the feed: mine.py:3 read() (data, since step 9)",
        ),
        (
            {0: WAITING, 1: RankSnapshot(STEP_9, location=IN_LOSS, collective=BEFORE)},
            (1,),
            "rank 1 in mine.py:8 loss() (step, since step 9)",
        ),
        (
            {0: WAITING, 1: RankSnapshot(STEP_9, location=IN_LOSS, collective=SUMMED)},
            (1,),
            "rank 0 in all_reduce (step, since step 9)",
        ),
        (
            {0: WAITING, 1: RankSnapshot(STEP_9, collective=IN_BROADCAST)},
            (),
            "rank 0 in all_reduce number 7 of [[10]]; rank 1 in broadcast",
        ),
        ({0: WAITING, 1: WAITING}, (), "ranks 0, 1 in all_reduce"),
        (
            {0: RankSnapshot(STEP_9, location=IN_LOSS)},
            (0,),
            "rank 0 gave no sign for 61 s (limit 60 s)",
        ),
    ],
)
def test_who_is_named(
    snapshots: dict[int, RankSnapshot], culprits: tuple[int, ...], says: str
) -> None:
    verdict = judge(snapshots, Silence(61, 60), HangLimit(60), world_size=len(snapshots))
    assert verdict.culprits == culprits
    assert says in verdict.cause
    assert verdict.again == ("different collectives" not in verdict.cause)
    assert verdict.remedy


def test_a_start_and_many_quick_steps_between_two_looks() -> None:
    watch = SilenceWatch(HangLimit(20))
    assert watch.observe(0, {0: Beat(0, "start", 0)}, INTERVAL) is None
    assert silent_after(watch, 0.2, {0: Beat(18, "data", 40)}) == pytest.approx(20, abs=1)


def test_a_user_s_line_is_found_in_the_thread_that_reads() -> None:
    dump = """Thread 0x01 (most recent call first):
  File "/home/me/mine.py", line 31 in __getitem__
  File "/x/site-packages/samecurve/data/feed.py", line 99 in _steps

Current thread 0x02 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 10 in wait
  File "/x/site-packages/samecurve/data/feed.py", line 160 in _ahead
  File "/x/site-packages/samecurve/core/loop.py", line 33 in train
"""
    assert locate(dump) == Location("data", "the feed: mine.py:31 __getitem__()")
    assert locate("") is None


def test_a_data_worker_s_line_is_found_in_its_own_stack() -> None:
    """The feed waits for workers; of two, one is in the user's code."""
    dump = """Thread 0x01 (most recent call first):
  File "/usr/lib/python3.11/multiprocessing/connection.py", line 9 in recv_bytes
  File "/x/site-packages/samecurve/data/workers.py", line 85 in _wait
  File "/x/site-packages/samecurve/data/feed.py", line 99 in _steps

Current thread 0x02 (most recent call first):
  File "/x/site-packages/samecurve/data/feed.py", line 160 in _ahead
"""
    idle = """Current thread 0x03 (most recent call first):
  File "/x/site-packages/samecurve/data/workers.py", line 130 in serve
"""
    busy = """Current thread 0x04 (most recent call first):
  File "/usr/lib/python3.11/socket.py", line 700 in readinto
  File "/home/me/mine.py", line 31 in __getitem__
  File "/x/site-packages/samecurve/data/workers.py", line 133 in serve
"""
    assert locate(dump, idle + busy) == Location(
        "data", "the feed: a data worker in mine.py:31 __getitem__() -> readinto()"
    )
    assert locate(dump, idle) == Location("data", "the feed, waiting for a data worker")


def test_a_main_thread_s_own_stack_is_read_where_no_other_is_there() -> None:
    """As the signal's handler writes it; a dump of all threads has the main thread once more."""
    own = """Stack (most recent call first):
  File "/home/me/rows.py", line 7 in __getitem__
"""
    assert locate(own) == Location("other", "rows.py:7 __getitem__()")
    whole = """Thread 0x01 (most recent call first):
  File "/home/me/rows.py", line 9 in __getitem__
"""
    assert locate(own + whole) == Location("other", "rows.py:9 __getitem__()")


BUSY = """
import os, sys, threading, time
from pathlib import Path
from samecurve.watch import ASK_SIGNAL, answering

def deep(n):
    return deep(n - 1) if n else 0

def work():
    while True:
        thread = threading.Thread(target=deep, args=(400,))
        thread.start()
        thread.join()

with answering(Path(sys.argv[1]), 0):
    for _ in range(3):
        threading.Thread(target=work, daemon=True).start()
    if not (child := os.fork()):
        for _ in range(300):
            os.kill(os.getppid(), ASK_SIGNAL)
            time.sleep(0.002)
        os._exit(0)
    os.waitpid(child, 0)
    os._exit(0)
"""


def test_a_process_whose_threads_run_survives_being_asked(tmp_path: Path) -> None:
    """A signal's handler that reads other threads' frames ended it within 300 signals (SIGSEGV)."""
    done = subprocess.run([sys.executable, "-c", BUSY, str(tmp_path)], check=False, timeout=60)
    assert done.returncode == 0
    assert "in work" in (tmp_path / "stack-0.txt").read_text()
    assert (tmp_path / "collectives-0.json").exists()


def recorded(number: int, size: int, *, ended: bool) -> dict[str, Any]:
    """An entry of torch's flight recorder."""
    return {
        "record_id": number,
        "profiling_name": "nccl:all_reduce",
        "input_sizes": [[size]],
        "retired": ended,
        "state": "completed" if ended else "scheduled",
    }


def test_a_collective_that_hangs_is_named_though_the_host_has_queued_a_hundred_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hosts of GPUs run ahead: the last collective that a rank called is not where it waits."""
    snapshots = {}
    for rank, size in enumerate((3, 5)):
        entries = [recorded(number, 10, ended=True) for number in range(80)]
        entries.append(recorded(80, size, ended=False))
        entries += [recorded(number, 10, ended=False) for number in range(81, 181)]
        text = json.dumps({"entries": entries}).encode()
        native = SimpleNamespace(_dump_nccl_trace_json=lambda text=text: text)
        monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", native)
        flight_recorder.record(str(tmp_path / "answer.json"))
        kept = json.loads((tmp_path / "answer.json").read_text())
        assert len(kept) == 50
        snapshots[rank] = RankSnapshot(Beat(80, "step", 80), collective=current_collective(kept))
    verdict = judge(snapshots, Silence(4, 4), HangLimit(4), world_size=2)
    assert "rank 0 in all_reduce number 80 of [[3]]" in verdict.cause
    assert "rank 1 in all_reduce number 80 of [[5]]" in verdict.cause
    assert not verdict.again
