"""Trackers (TensorBoard, W&B, ...) as readers of the journal, each in a process of its own beside
the launcher. An entry point of the group `samecurve.trackers` names each tracker's class.

Each tracker has a process of its own, because writing holds the interpreter's lock (52 us a step
for TensorBoard, 375 for W&B), and because a tracker's imports, threads and exits must not affect
training. It reads until its standard input ends, and then to the end of the journal. It saves its
position beside its own files, so that the next start continues there.
"""

import fcntl
import json
import os
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from samecurve.core.entry_points import find, load
from samecurve.core.events import Event
from samecurve.core.system import write_json
from samecurve.observe import VOIDED, follow_batches
from samecurve.observe.failed_event import record_beside

TITLES = {
    "tensorboard": "TensorBoard",
    "wandb": "W&B",
    "mlflow": "MLflow",
    "trackio": "trackio",
    "kubeflow": "Kubeflow Trainer",
}
KUBEFLOW_VARIABLES = (
    "KUBEFLOW_TRAINER_SERVER_URL",
    "KUBEFLOW_TRAINER_SERVER_CA_CERT",
    "KUBEFLOW_TRAINER_SERVER_TOKEN",
)
TRAINING_GOES_ON = "training goes on without it, and the same command sends later what is missing"
EXIT_REPORTED = 3  # exit code: the tracker failed, and the journal says so
_PAUSE = 1.0  # seconds between reads of the journal


class Tracker(Protocol):
    """A tracker of a run; made of the run's directory, what `flush` returned last, mode, project.

    It empties what `flush` returned if it needs the journal from its beginning.
    """

    def take(self, event: Event) -> None: ...

    def flush(self) -> dict[str, int]:
        """Make all events so far durable; return what a later tracker needs to continue."""

    def close(self) -> None: ...


def main(name: str, home: str, mode: str, project: str) -> int:
    """Run the tracker of a run as a process; return its exit code.

    mode, project: where it writes, and under which name; Kubeflow's project is the values of
    KUBEFLOW_VARIABLES, as JSON
    """
    run, stop = Path(home), threading.Event()
    threading.Thread(target=_until_input_ends, args=(stop,), daemon=True).start()
    try:
        track(name, run, mode, project, stop)
        return 0
    except Exception as error:
        import traceback

        traceback.print_exc()
        cause = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        text = f"{TITLES.get(name, name)}: {cause[:300]}"
        if name == "wandb" and mode == "online":
            text += "; or --wandb offline"
        text += f"; {TRAINING_GOES_ON}"
        record_beside(run / "journal.jsonl", run / "logs", "warned", text=text)
        return EXIT_REPORTED


def _until_input_ends(stop: threading.Event) -> None:
    while os.read(0, 1 << 10):
        pass
    stop.set()


def track(name: str, run: Path, mode: str, project: str, stop: threading.Event) -> None:
    """Give new events of a run's journal to a tracker, from the saved position on.

    It ends when stop is set and the journal is read to its end.
    """
    directory, journal = run / "logs" / name, run / "journal.jsonl"
    directory.mkdir(parents=True, exist_ok=True)
    state_file = directory / f"{name}-{mode}.json"
    with open(directory / "lock", "a") as lock:
        # the tracker of a killed launcher may still be reading
        fcntl.flock(lock, fcntl.LOCK_EX)
        covered = _read_state(state_file, project, journal)
        point = find("trackers", name)
        assert point is not None, "checked before the run began"
        tracker: Tracker = load(point, "tracker")(run, covered, mode, project)
        for events, position in _events_that_count(journal, stop, covered.get("position", 0)):
            for event in events:
                tracker.take(event)
            write_json(state_file, {"position": position, "project": project, **tracker.flush()})
        tracker.close()


def _events_that_count(
    journal: Path, stop: threading.Event, start: int
) -> Iterator[tuple[list[Event], int]]:
    """Batches of follow_batches() without events that a later `resumed` in the file makes void."""
    at_once = threading.Event()
    at_once.set()
    resumes_ahead = deque(
        event.step
        for events, _ in follow_batches(journal, at_once, start)
        for event in events
        if event.kind == "resumed"
    )
    for events, end in follow_batches(journal, stop, start, _PAUSE):
        that_count = []
        for event in events:
            if event.kind == "resumed" and resumes_ahead:
                resumes_ahead.popleft()
            is_voidable = event.kind in VOIDED | {"sensors"}
            if not is_voidable or not resumes_ahead or event.step <= min(resumes_ahead):
                that_count.append(event)
        yield that_count, end


def _read_state(path: Path, project: str, journal: Path) -> dict[str, int]:
    """Read the saved position. {}: there is none for this journal and project."""
    try:
        state = json.loads(path.read_text())
        size = journal.stat().st_size
    except (OSError, ValueError):
        return {}
    if not isinstance(state, dict) or state.pop("project", None) != project:
        return {}
    if not 0 <= state.get("position", -1) <= size:
        return {}
    return state
