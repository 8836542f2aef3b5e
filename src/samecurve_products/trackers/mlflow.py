"""A run for MLflow: its metrics at their steps, its config, its samples, pictures and outcome.

The run is kept in logs/mlflow, or at the server that MLflow's own variables name.

MLflow can't take a value back. If a resume repeats steps, it keeps the first values, so each step
is sent once.
"""

import re
from pathlib import Path

from mlflow.entities import Metric, Param
from mlflow.entities import Run as MLflowRun
from mlflow.tracking import MlflowClient

from samecurve.observe.pictures import pictures, png
from samecurve.seam import Event, read_document
from samecurve_products.trackers.metrics import plotted
from samecurve_products.trackers.tracked_run import FirstValues, dotted, identity_of

_TAG = "samecurve_attempt"  # by which a later start finds the run again
_MOST_METRICS, _MOST_PARAMS = 1000, 100  # of one request
_MOST_CHARACTERS = 500  # of a parameter, in every version of MLflow
_OUTCOMES = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MLflow:
    """A run in MLflow. A tag holds the run's first attempt, so every start continues that run.

    covered: what flush() returned when the last tracker of this run ended
    mode: local, or server: where MLflow's variables say
    experiment: the name of the experiment
    """

    def __init__(self, run: Path, covered: dict[str, int], mode: str, experiment: str) -> None:
        self._run = run
        home = (run / "logs/mlflow").resolve()
        self._client = MlflowClient(f"sqlite:///{home}/mlflow.db" if mode == "local" else None)
        artifacts = (home / "artifacts").as_uri() if mode == "local" else None
        self._id, is_new = self._open(experiment, artifacts)
        if is_new:
            covered.clear()  # in this case the journal is read from its beginning
        self._first = FirstValues(run, "MLflow", covered)
        if not covered and not is_new:  # where it was is forgotten: the journal is read anew
            self._first.sent = self._first.repeated = self._newest_step()
        self._metrics: list[Metric] = []

    def take(self, event: Event) -> None:
        if event.kind == "planned":
            self._config()
        if event.kind == "started":
            self._client.update_run(self._id, "RUNNING")
        if not self._first.is_new(event):
            return
        self._first.sent = max(self._first.sent, event.step)
        at = round(event.time * 1000)
        self._metrics += [
            Metric(re.sub(r"[^\w\-./ ]", "_", name), value, at, event.step)
            for name, value in plotted(event).items()
        ]
        if event.kind == "sampled":
            self._samples(event)
        if event.kind in _OUTCOMES:
            self._send()
            self._client.set_terminated(self._id, _OUTCOMES[event.kind], at)

    def flush(self) -> dict[str, int]:
        self._send()
        return self._first.state()

    def close(self) -> None:
        self._send()

    def _open(self, experiment: str, artifacts: str | None) -> tuple[str, bool]:
        """The id of the MLflow run, and whether it is new."""
        known = self._client.get_experiment_by_name(experiment)
        if known is None:
            identity = self._client.create_experiment(experiment, artifacts)
        else:
            identity = known.experiment_id
        attempt = identity_of(self._run)
        is_this_run = f"tags.`{_TAG}` = '{attempt}'"
        runs = self._client.search_runs([identity], is_this_run, max_results=1)
        if runs:
            return str(runs[0].info.run_id), False
        created: MLflowRun = self._client.create_run(
            identity, tags={_TAG: attempt}, run_name=self._run.resolve().name
        )
        return str(created.info.run_id), True

    def _newest_step(self) -> int:
        losses = self._client.get_metric_history(self._id, "train/loss")
        return max((loss.step for loss in losses), default=0)

    def _send(self) -> None:
        while self._metrics:
            self._client.log_batch(self._id, metrics=self._metrics[:_MOST_METRICS])
            del self._metrics[:_MOST_METRICS]

    def _config(self) -> None:
        """The config as parameters, which MLflow lets nobody change, and whole as a file."""
        path = self._run / "config.yaml"
        there = self._client.get_run(self._id).data.params
        values = {
            key: str(value)[:_MOST_CHARACTERS]
            for key, value in dotted(read_document(path).value).items()
            if key not in there and value not in ("", None)
        }
        params = [Param(key, value) for key, value in values.items()]
        for first in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._id, params=params[first : first + _MOST_PARAMS])
        self._client.log_artifact(self._id, str(path))

    def _samples(self, event: Event) -> None:
        for index, text in enumerate(event.values.get("texts", ())):
            name = f"samples/step-{event.step:08d}-{index}.txt"
            self._client.log_text(self._id, str(text), name)
        for name in pictures(event):
            try:
                png(self._run, name)
                self._client.log_artifact(self._id, str(self._run / name), "pictures")
            except (OSError, ValueError) as error:
                self._first.warn(event.step, f": picture {name} is left out: {error}")
