"""A run for W&B: its config, its metrics at their steps, samples and pictures.

The run is kept offline in logs/wandb, or sent to W&B's server. Nothing else is sent.

W&B can't go back to an earlier step. If a resume repeats steps, W&B keeps the first values, so each
step is sent once.
"""

import html
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from samecurve.observe.pictures import pictures, png
from samecurve.seam import Event, read_document
from samecurve_products.trackers.metrics import plotted
from samecurve_products.trackers.tracked_run import FirstValues, identity_of


class WandB:
    """A run in W&B. Its id is the run's first attempt, so every start continues the same W&B run.

    covered: what flush() returned when the last tracker of this run ended
    mode: offline or online
    """

    def __init__(self, run: Path, covered: dict[str, int], mode: str, project: str) -> None:
        self._run = run
        self._first = FirstValues(run, "W&B", covered)
        self._early: list[Event] = []  # sensor readings of the step that is sent next
        self._mode, self._project = mode, project
        # opened at the first metric, so that nothing is opened if W&B has the whole run
        self._wandb_run: Any = None  # wandb.Run

    def take(self, event: Event) -> None:
        if event.kind == "resumed":
            self._early = []
        if not self._first.is_new(event):
            return
        if event.kind == "sensors" and event.step > self._first.sent:
            self._early.append(event)
        elif event.kind == "step":
            for early in [reading for reading in self._early if reading.step < event.step]:
                self._early.remove(early)
                self._log(early.step, plotted(early))
            self._log(event.step, plotted(event))
        else:
            self._log(event.step, {**plotted(event), **self._media(event)})

    def flush(self) -> dict[str, int]:
        return self._first.state()

    def close(self) -> None:
        for early in self._early:
            self._log(self._first.sent, plotted(early))
        if self._wandb_run:
            self._wandb_run.finish()

    def _open(self) -> Any:
        settings = wandb.Settings(
            console="off",
            silent=True,
            disable_code=True,
            disable_git=True,
            x_disable_stats=True,
            x_disable_meta=True,
            x_save_requirements=False,
        )
        return wandb.init(
            project=self._project,
            id=identity_of(self._run),
            name=self._run.resolve().name,
            dir=str(self._run / "logs"),
            mode="online" if self._mode == "online" else "offline",
            resume="allow",
            config=read_document(self._run / "config.yaml").value,
            allow_val_change=True,
            settings=settings,
        )

    def _log(self, step: int, values: Mapping[str, object]) -> None:
        if values:
            self._wandb_run = self._wandb_run or self._open()
            self._first.sent = max(step, self._first.sent)
            self._wandb_run.log(values, step=self._first.sent)

    def _media(self, event: Event) -> dict[str, object]:
        """The texts and pictures of a `sampled` event."""
        if event.kind != "sampled":
            return {}
        media: dict[str, object] = {
            f"samples/{index}": wandb.Html(f"<pre>{html.escape(str(text))}</pre>", inject=False)
            for index, text in enumerate(event.values.get("texts", ()))
        }
        for index, name in enumerate(pictures(event)):
            try:
                png(self._run, name)
                media[f"pictures/{index}"] = wandb.Image(str(self._run / name))
            except (OSError, ValueError, wandb.Error) as error:
                self._first.warn(event.step, f": picture {name} is left out: {error}")
        return media
