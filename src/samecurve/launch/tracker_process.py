"""The trackers beside a run (TensorBoard, W&B, ...), each a process that reads the journal.

A tracker's process ends once its standard input has ended and it has read the journal to its end.
So it outlives a killed launcher by no more than that.
"""

import json
import os
import threading
from contextlib import suppress
from subprocess import PIPE

from samecurve.core.config.sections import Track
from samecurve.observe.failed_event import record_beside
from samecurve.observe.trackers import EXIT_REPORTED, KUBEFLOW_VARIABLES, TITLES, TRAINING_GOES_ON
from samecurve.processes import OUTLIVES, Call, Process, child_environment, how_ended, start_process
from samecurve.run.directory import Run

# the variables by which a tracker's library is told of a server
_SERVERS = {
    "mlflow": ("MLFLOW_TRACKING_URI",),
    "trackio": ("TRACKIO_SERVER_URL", "TRACKIO_SPACE_ID"),
}
_QUIET = 3.0  # seconds of waiting after which the user is told what is waited for


class Tracker:
    """The process of one tracker. A failure is said once, in the journal, and the run goes on."""

    def __init__(self, name: str, run: Run, track: Track) -> None:
        self._name, self._run, self._ending = name, run, False
        self._process: Process | None = None
        try:
            with open(run.logs / f"{name}.log", "ab") as log:
                call = Call(
                    "samecurve.observe.trackers",
                    (name, str(run.home), *_mode_and_project(name, track)),
                    environment=child_environment(**_variables(name, run)),
                    new_session=True,  # Ctrl-C is the launcher's
                    ended_by=OUTLIVES,
                )
                file = log.fileno()
                self._process = start_process(call, stdin=PIPE, stdout=file, stderr=file)
        except OSError as error:
            self._warn(f"could not be started: {error.strerror}")
            return
        self._watch = threading.Thread(target=self._wait, name=name, daemon=True)
        self._watch.start()

    def finish(self, drain: float) -> None:
        """End the process's input, and wait until the tracker has taken everything."""
        if self._process is None or self._process.stdin is None:
            return
        with suppress(OSError):  # the process has ended
            self._process.stdin.close()
        try:
            with suppress(KeyboardInterrupt):
                self._watch.join(_QUIET)
                if self._watch.is_alive():
                    title = TITLES.get(self._name, self._name)
                    os.write(
                        2, f"waiting for {title} to take the rest; Ctrl-C leaves it\n".encode()
                    )
                    self._watch.join(drain)
        finally:
            if self._watch.is_alive():
                self._ending = True
                self._process.kill()
                self._warn("was left before it had taken everything")

    def _wait(self) -> None:
        assert self._process is not None
        code = self._process.wait()
        if code in {0, EXIT_REPORTED} or self._ending:
            return
        log = self._run.logs / f"{self._name}.log"
        self._warn(f"its process left with {how_ended(code)}; {log} may say more")

    def _warn(self, what: str) -> None:
        text = f"{TITLES.get(self._name, self._name)}: {what}; {TRAINING_GOES_ON}"
        record_beside(self._run.journal, self._run.logs, "warned", text=text)


def _mode_and_project(name: str, track: Track) -> tuple[str, str]:
    """Where a tracker writes, and under which name."""
    if name == "wandb":
        return track.wandb, track.wandb_project
    if name == "kubeflow":
        places = [os.environ.get(variable, "") for variable in KUBEFLOW_VARIABLES]
        return "api", json.dumps(places)
    if name in _SERVERS:
        is_elsewhere = any(os.environ.get(variable) for variable in _SERVERS[name])
        return "server" if is_elsewhere else "local", track.experiment
    return "file", ""


def _variables(name: str, run: Run) -> dict[str, str]:
    """Variables that a tracker's library has beside the launcher's own."""
    if name == "mlflow":  # what it would tell its makers
        return {"MLFLOW_DISABLE_TELEMETRY": "true"}
    if name == "trackio" and not os.environ.get("TRACKIO_DIR"):
        return {"TRACKIO_DIR": str((run.logs / "trackio").resolve())}
    return {}
