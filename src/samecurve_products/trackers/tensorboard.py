"""A run for TensorBoard: one event file in logs/tensorboard, appended start after start.

Metrics of steps, evaluations and sensors as scalars; plan, config, samples and warnings as texts;
pictures as they are. A `resumed` line becomes the mark that makes TensorBoard drop what came after
that step. Only TensorBoard's records and protocol buffers are used: no TensorFlow, no torch.
"""

import struct
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event as Record
from tensorboard.compat.proto.event_pb2 import SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from samecurve.observe.pictures import pictures, png
from samecurve.seam import Event, Plan, banner
from samecurve_products.trackers.metrics import plotted


class TensorBoard:
    """Write a run's event file.

    covered: what flush() returned when the last tracker of this run ended. Without it, or without
    the event file, everything is written anew.
    """

    def __init__(self, run: Path, covered: dict[str, int], mode: str, project: str) -> None:
        del mode, project
        self._run = run
        path = run / "logs/tensorboard/events.out.tfevents.samecurve"
        former = path.with_name("events.out.tfevents.lockstep")  # the former name of the program
        if former.exists() and not path.exists():
            former.rename(path)
        size = covered.get("size", 0)
        if not path.exists() or path.stat().st_size < size:
            size = 0
            covered.clear()  # in this case the journal is read from its beginning
        mode = "r+b" if path.exists() else "w+b"
        self._file = open(path, mode)  # noqa: SIM115 - open as long as the run is followed
        self._file.truncate(size)
        self._file.seek(size)
        self._writer = RecordWriter(self._file)
        self._texts: dict[str, tuple[int, str]] = {}
        self._last_sensors = -1  # step of the last readings

    def take(self, event: Event) -> None:
        if not self._file.tell():
            self._write(Record(wall_time=event.time, file_version="brain.Event:2"))
            self._start(event.time, 0)
        if event.kind == "resumed":
            self._start(event.time, event.step + 1)
            self._last_sensors = min(self._last_sensors, event.step)
        elif event.kind == "planned":
            self._text(event, "plan", _verbatim(_banner(event)))
            self._text(event, "config", _verbatim((self._run / "config.yaml").read_text()))
        elif event.kind == "warned":
            self._text(event, "warnings", str(event.values.get("text", "")))
        elif event.kind == "sampled":
            for index, text in enumerate(event.values.get("texts", ())):
                self._text(event, f"samples/{index}", _verbatim(str(text)))
            for index, path in enumerate(pictures(event)):
                self._picture(event, f"pictures/{index}", path)
        elif event.kind != "sensors":
            self._scalars(event, plotted(event))
        elif event.step > self._last_sensors:  # TensorBoard has one value a step and tag
            self._scalars(event, plotted(event))
            self._last_sensors = event.step

    def flush(self) -> dict[str, int]:
        self._writer.flush()
        return {"size": self._file.tell()}

    def close(self) -> None:
        self._writer.close()

    def _write(self, record: Record) -> None:
        self._writer.write(record.SerializeToString())

    def _start(self, at: float, step: int) -> None:
        """Mark a start: TensorBoard drops earlier values at this step or later."""
        self._write(
            Record(wall_time=at, step=step, session_log=SessionLog(status=SessionLog.START))
        )

    def _scalars(self, event: Event, metrics: Mapping[str, float]) -> None:
        if metrics:
            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in metrics.items()]
            self._write_summary(event, Summary(value=values))

    def _write_summary(self, event: Event, summary: Summary) -> None:
        self._write(Record(wall_time=event.time, step=event.step, summary=summary))

    def _text(self, event: Event, tag: str, text: str) -> None:
        """Add a text. TensorBoard keeps one text for each step and tag, so texts are joined."""
        step, before = self._texts.get(tag, (-1, ""))
        if step == event.step and text != before:
            text = f"{before}\n\n{text}"
        self._texts[tag] = event.step, text
        self._write_summary(event, text_pb(tag, text))

    def _picture(self, event: Event, tag: str, name: str) -> None:
        try:
            content = png(self._run, name)
        except (OSError, ValueError) as error:
            self._text(event, "warnings", f"picture {name} is left out: {error}")
            return
        width, height = struct.unpack(">II", content[16:24])
        image = Summary.Image(
            width=width, height=height, colorspace=3, encoded_image_string=content
        )
        self._write_summary(event, Summary(value=[Summary.Value(tag=tag, image=image)]))


def _banner(event: Event) -> str:
    try:
        return "\n".join(banner(Plan.from_json(event.values["plan"])))
    except (KeyError, TypeError, ValueError) as error:
        return f"a plan of another version of Samecurve ({error})"


def _verbatim(text: str) -> str:
    """Markdown that shows the text unchanged."""
    return "\n".join(f"    {line}" for line in text.splitlines())
