"""TensorBoard and W&B as readers of the journal: `python -m samecurve.observe.trackers NAME RUN
MODE PROJECT`, a process beside the launcher.

Each has a process of its own since writing takes the interpreter's lock (52 us a step for
TensorBoard, 375 for W&B), and since neither's imports, threads and exits are to touch training. It
reads until its standard input ends, then to the journal's end. What it has covered is kept beside
what it wrote, so that the next start goes on exactly there.
"""

import fcntl
import json
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from samecurve.core.events import Event
from samecurve.observe.heartbeat import read_heartbeat
from samecurve.observe.journal import VOIDED, append_event, follow_batches

TITLES = {"tensorboard": "TensorBoard", "wandb": "W&B"}
TRAINING_GOES_ON = "training goes on without it, and the same command sends later what is missing"
EXIT_REPORTED = 3  # exit code: it failed, and the journal says so
_PAUSE = 1.0  # seconds between looks at the journal


class Tracker(Protocol):
    """take: one event.

    flush: what was taken is safe; returns what open() needs to go on from there.
    """

    def take(self, event: Event) -> None: ...
    def flush(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


def main(name: str, run: Path, mode: str, project: str) -> int:
    """Returns the exit code. mode, project: of W&B."""
    stop = threading.Event()
    threading.Thread(target=_until_input_ends, args=(stop,), daemon=True).start()
    try:
        track(name, run, mode, project, stop)
        return 0
    except Exception as error:
        import traceback

        traceback.print_exc()
        pulse = read_heartbeat(run / "logs/pulse-0")
        said = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        remedy = "; or --wandb offline" if mode == "online" and name == "wandb" else ""
        text = f"{TITLES[name]}: {said[:300]}{remedy}; {TRAINING_GOES_ON}"
        append_event(
            run / "journal.jsonl", Event("warned", pulse[0] if pulse else 0, {"text": text})
        )
        return EXIT_REPORTED


def _until_input_ends(stop: threading.Event) -> None:
    while os.read(0, 1 << 10):
        pass
    stop.set()


def track(name: str, run: Path, mode: str, project: str, stop: threading.Event) -> None:
    """Give a run's journal to a tracker as it grows, from where it was left, until stop is set and
    the journal is read to its end.
    """
    home = run / "logs" / name
    home.mkdir(parents=True, exist_ok=True)
    with open(home / "lock", "a") as lock:
        fcntl.flock(
            lock, fcntl.LOCK_EX
        )  # the one of a launcher that was killed may still be at the rest
        kept, journal = home / f"{name}-{mode}.json", run / "journal.jsonl"
        covered = _read(kept, project, journal)
        tracker: Tracker
        if name == "tensorboard":
            from samecurve.observe.tensorboard import TensorBoard

            tracker = TensorBoard(run, covered)
        else:
            from samecurve.observe.wandb import WandB

            tracker = WandB(run, covered, mode, project)
        for events, position in _counting(journal, stop, covered.get("position", 0)):
            for event in events:
                tracker.take(event)
            _write(kept, {"position": position, "project": project, **tracker.flush()})
        tracker.close()


def _counting(
    journal: Path, stop: threading.Event, start: int
) -> Iterator[tuple[list[Event], int]]:
    """batches(), without the lines that a `resumed` which is there already has made void."""
    now = threading.Event()
    now.set()
    ahead = deque(
        event.step
        for events, _ in follow_batches(journal, now, start)
        for event in events
        if event.kind == "resumed"
    )
    for events, end in follow_batches(journal, stop, start, _PAUSE):
        counting = []
        for event in events:
            if event.kind == "resumed" and ahead:
                ahead.popleft()
            if not ahead or event.step <= min(ahead) or event.kind not in VOIDED | {"sensors"}:
                counting.append(event)
        yield counting, end


def _read(kept: Path, project: str, journal: Path) -> dict[str, Any]:
    """{}: nothing is covered, or not of this journal, or for another project."""
    try:
        found = json.loads(kept.read_text())
        size = journal.stat().st_size
    except (OSError, ValueError):
        return {}
    return (
        found
        if isinstance(found, dict)
        and found.get("project") == project
        and 0 <= found.get("position", -1) <= size
        else {}
    )


def _write(kept: Path, covered: dict[str, Any]) -> None:
    scratch = kept.with_suffix(".part")
    scratch.write_text(json.dumps(covered))
    scratch.replace(kept)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4]))
