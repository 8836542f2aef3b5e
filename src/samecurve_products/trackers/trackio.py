"""A run for trackio: its config, its metrics at their steps, its samples and pictures.

The run is kept in logs/trackio, or where trackio's own variables say.

trackio can't take a value back. If a resume repeats steps, it keeps the first values, so each step
is sent once.
"""

from pathlib import Path
from typing import Any

import trackio
from trackio.sqlite_storage import SQLiteStorage

from samecurve.observe.pictures import pictures, png
from samecurve.seam import Event, read_document
from samecurve_products.trackers.metrics import plotted
from samecurve_products.trackers.tracked_run import FirstValues, dotted, identity_of


class Trackio:
    """A run in trackio. Its name ends with the run's first attempt, so every start continues it.

    covered: what flush() returned when the last tracker of this run ended
    mode: local, or server: where trackio's variables say
    """

    def __init__(self, run: Path, covered: dict[str, int], mode: str, project: str) -> None:
        self._run, self._mode, self._project = run, mode, project
        self._name = f"{run.resolve().name}-{identity_of(run)}"
        self._first = FirstValues(run, "trackio", covered)
        if mode == "local":
            # trackio writes in the background: after a kill it may have less than was sent, or more
            has = self._newest_step()
            if has != self._first.sent:
                covered.clear()  # in this case the journal is read from its beginning
                self._first.sent = self._first.repeated = has
        # opened at the first metric, so that nothing is opened if trackio has the whole run
        self._trackio_run: Any = None  # trackio.Run

    def take(self, event: Event) -> None:
        if not self._first.is_new(event):
            return
        values = {**plotted(event), **self._media(event)}
        if values:
            self._trackio_run = self._trackio_run or self._open()
            self._first.sent = max(self._first.sent, event.step)
            self._trackio_run.log(values, step=event.step)

    def flush(self) -> dict[str, int]:
        return self._first.state()

    def close(self) -> None:
        """OSError: trackio, which raises nothing itself, did not keep everything."""
        if not self._trackio_run:
            return
        self._trackio_run.finish()
        if self._mode == "local" and self._newest_step() < self._first.sent:
            raise OSError("it did not keep what it was given; logs/trackio.log says why")

    def _newest_step(self) -> int:
        return SQLiteStorage.get_max_step_for_run(self._project, self._name) or 0

    def _open(self) -> Any:
        return trackio.init(
            self._project,
            name=self._name,
            config=dotted(read_document(self._run / "config.yaml").value),
            resume="allow",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def _media(self, event: Event) -> dict[str, object]:
        """The texts and pictures of a `sampled` event."""
        if event.kind != "sampled":
            return {}
        media: dict[str, object] = {
            f"samples/{index}": trackio.Markdown(f"```\n{text}\n```")
            for index, text in enumerate(event.values.get("texts", ()))
        }
        for index, name in enumerate(pictures(event)):
            try:
                png(self._run, name)
                media[f"pictures/{index}"] = trackio.Image(str(self._run / name))
            except (OSError, ValueError) as error:
                self._first.warn(event.step, f": picture {name} is left out: {error}")
        return media
