"""A run's progress for Kubeflow Trainer, as a reader of the journal.

Trainer names in the environment of a TrainJob's pods where progress is reported, with which token
and certificate. `kubectl get trainjob` then shows the percentage, the time left and the metrics.
"""

import json
import ssl
import time
import urllib.request
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from samecurve.seam import Event, Plan
from samecurve_products.trackers.metrics import plotted

_EVERY = 5.0  # seconds between two reports, as Trainer asks
_WAIT = 5.0  # seconds for one report
_MOST_METRICS, _MOST_CHARACTERS = 256, 64


class Kubeflow:
    """Report a run's progress. A report that fails is left out: the next one says more."""

    def __init__(self, run: Path, covered: dict[str, int], mode: str, places: str) -> None:
        """places: the url, and the files of the certificate and the token, as JSON"""
        del covered, mode
        self._plan = run / "plan.json"
        self._url, self._certificate, self._token = json.loads(places)
        self._metrics: dict[str, float] = {}
        self._first: Event | None = None  # step of this start
        self._last: Event | None = None
        self._reported = -_EVERY
        self._failure = ""

    def take(self, event: Event) -> None:
        if event.kind in {"resumed", "started"}:
            self._first = None
        if event.kind == "step":
            self._first, self._last = self._first or event, event
        if event.kind in {"step", "evaluated", "tested"}:
            self._metrics |= plotted(event)

    def flush(self) -> dict[str, int]:
        """Report, at most every few seconds."""
        if time.monotonic() - self._reported >= _EVERY:
            self._report()
        return {}

    def close(self) -> None:
        """Report the end. OSError: it could not be reported."""
        self._report()
        if self._failure:
            raise OSError(f"progress was not reported: {self._failure}")

    def _report(self) -> None:
        if self._last is None:
            return
        self._reported = time.monotonic()
        request = urllib.request.Request(
            self._url,
            data=json.dumps({"trainerStatus": self.status()}).encode(),
            headers={
                "Content-Type": "application/json",
                # the token is changed from time to time
                "Authorization": f"Bearer {Path(self._token).read_text().strip()}",
            },
        )
        context = None
        if self._url.startswith("https:"):
            context = ssl.create_default_context(cafile=self._certificate)
        try:
            with urllib.request.urlopen(request, timeout=_WAIT, context=context):
                self._failure = ""
        except OSError as error:
            self._failure = str(error)

    def status(self) -> dict[str, Any]:
        """The present state, as Trainer's API has it."""
        assert self._last is not None
        plan = Plan.from_json(json.loads(self._plan.read_text())["plan"])
        done, steps = self._last.step, plan.steps
        status: dict[str, Any] = {
            "progressPercentage": min(100, 100 * done // steps),
            "metrics": [
                {"name": name[:_MOST_CHARACTERS], "value": f"{value:.6g}"}
                for name, value in list(self._metrics.items())[:_MOST_METRICS]
            ],
            "lastUpdatedTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        if self._first is not None and done > self._first.step:
            a_step = (self._last.time - self._first.time) / (done - self._first.step)
            status["estimatedRemainingSeconds"] = round(a_step * (steps - done))
        return status
