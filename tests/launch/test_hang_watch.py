"""Who watches real ranks: when it takes silence for a hang."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from samecurve.observe import read_beat, read_events
from samecurve.watch import HangLimit
from samecurve.watch.hang_watch import HangWatch

FLOOR = 0.5  # seconds
RANK = """
import sys, time
from pathlib import Path
from samecurve.observe import Heartbeat
from samecurve.watch import answering

logs = Path(sys.argv[1])
exec(compile("def silent():\\n    time.sleep(60)", sys.argv[2], "exec"))
with answering(logs, 0):
    beat = Heartbeat(logs / "heartbeat-0")
    for step in range(10):
        beat(step, "data")
        beat(step, "step")
        time.sleep(0.01)
    silent()
"""


@pytest.mark.parametrize(
    ("file", "compiles"), [("torch/_dynamo/convert_frame.py", True), ("mine.py", False)]
)
def test_a_rank_that_compiles_is_given_the_patience_of_a_first_step(
    *, file: str, compiles: bool, tmp_path: Path
) -> None:
    """A real rank, whose steps are quick until one is silent, in a function of such a file: a shape
    that comes late. It is no hang for ten times the floor, and one after that.
    """
    with subprocess.Popen([sys.executable, "-c", RANK, str(tmp_path), file]) as process:
        try:
            error = None
            limit = HangLimit(FLOOR)
            hangs = HangWatch(tmp_path, lambda: {0: process.pid}, world_size=1, limit=limit)
            while not read_beat(tmp_path / "heartbeat-0"):
                time.sleep(0.01)
            began = time.monotonic()
            while not (error := hangs.look()):
                time.sleep(0.05)
            silent = time.monotonic() - began
        finally:
            process.kill()
    assert "gave no sign for" in error.cause
    assert (silent > 10 * FLOOR) == compiles, silent


LONE = """
import sys
from pathlib import Path
from samecurve.watch import HangLimit
from samecurve.watch import watched_from_outside
from samecurve.observe import Heartbeat
from samecurve.run.directory import Run
from samecurve.watch import announce
from samecurve.watch import answering

run = Run(Path(sys.argv[1]))
run.logs.mkdir()
announce(run.logs, 0)
limit = HangLimit(0.5, unknown=0.5)
with watched_from_outside(run.journal, run.logs, world_size=1, limit=limit), answering(run.logs, 0):
    beat = Heartbeat(run.logs / "heartbeat-0")
    beat(3, "step")
    sum(range(10**13))  # which lets no other thread run
"""


def test_a_lone_process_is_watched_though_it_holds_the_interpreters_lock(tmp_path: Path) -> None:
    """It can't end itself then: the watcher says what it saw, and ends it."""
    done = subprocess.run(
        [sys.executable, "-c", LONE, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stderr.startswith("error: rank 0 gave no sign for ")
    assert [event.kind for event in read_events(tmp_path / "journal.jsonl")] == ["failed"]
