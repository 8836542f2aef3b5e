"""The sections of a run's page, apart from its charts.

Each function yields the elements of one section, or nothing if the run has no data for it.
"""

import base64
import math
from collections.abc import Iterator
from pathlib import Path

from samecurve.core.evaluation import class_names, class_scores, is_confusion
from samecurve.core.events import BESIDE_METRICS, Event
from samecurve.core.system.files import read_file_bytes
from samecurve.observe.plan_text import banner, decisions
from samecurve.report import summary
from samecurve.report.markup import Html, element, table
from samecurve.report.record import RunRecord, Start, number
from samecurve.report.words import show_moment, show_number, show_value
from samecurve.units import counted, show_bytes, show_seconds

_MAX_ROWS = 300
_MAX_COLUMNS = 65  # columns of an evaluation's array that are shown, row numbers included
_MAX_TEXTS, _MAX_TEXT = 8, 20_000  # characters
_MAX_PICTURES, _MAX_PICTURE = 8, 2 << 20  # bytes
_PNG = b"\x89PNG\r\n\x1a\n"
_ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"
_WHERE_ALL_ARE = "journal.jsonl has them all"
_OUTCOMES = {
    "running": "It is still running: the page is as of now.",
    "starting": "It is starting.",
    "not started": "Nothing was ever started here.",
}


def notes(record: RunRecord, name: str = "") -> Iterator[Html]:
    """Notes that come before any number: failed, cut off, nothing trained, damaged files.

    name: of the run, before each note
    """
    yield from _outcome_note(record, name)
    if not record.num_steps and record.starts:
        yield element("p", f"{name}No step was trained, so there are no curves.", class_="note")
    elif record.num_steps and not record.evaluated:
        yield element("p", f"{name}It was never evaluated.", class_="quiet")
    if record.began_from:
        yield element("p", f"{name}It began from {record.began_from}.", class_="quiet")
    for fault in record.faults:
        yield element("p", name + fault, class_="note bad")


def _outcome_note(record: RunRecord, name: str) -> Iterator[Html]:
    how = summary.outcome(record)
    if how == "failed":
        values = record.starts[-1].end_values
        cause = str(values.get("cause", ""))
        if values.get("remedy"):
            cause = f"{cause} Remedy: {values['remedy']}"
        yield element("p", name, element("b", "Failed: "), cause, class_="note bad")
    elif how == "cut off":
        text = (
            f"The last start ended without a word at step {record.starts[-1].last_step}: killed, or"
            " the machine went down."
        )
        yield element("p", name + text, class_="note")
    elif how in _OUTCOMES:
        yield element("p", name + _OUTCOMES[how], class_="note")


def plan_in_short(record: RunRecord) -> Iterator[Html]:
    if record.plan:
        yield element("pre", "\n".join(banner(record.plan)))


def happened(record: RunRecord) -> Iterator[Html]:
    """Resumes, restarts, warnings and ends, the oldest first."""
    rows: list[list[object]] = [
        [show_moment(event.time), event.step, event.kind, _describe(event)]
        for event in record.notable
    ]
    if rows:
        yield element("h2", "What happened")
        yield _shortened_table(["when", "step", "what", ""], rows, _WHERE_ALL_ARE)


def _describe(event: Event) -> str:
    values = event.values
    if event.kind == "failed":
        parts = [str(values[name]) for name in ("cause", "remedy") if values.get(name)]
        return " Remedy: ".join(parts)
    if event.kind in {"finished", "stopped"}:
        seconds = show_seconds(number(values.get("seconds"), 0.0))
        goodput = number(values.get("goodput"), 0.0)
        return f"{show_value(values.get('steps'))} steps in {seconds}, goodput {goodput:.0%}"
    return str(values.get("text", ""))


def _shortened_table(head: list[str], rows: list[list[object]], where_all: str) -> Html:
    """A table without its middle rows, if it is very long."""
    if len(rows) > _MAX_ROWS:
        half = _MAX_ROWS // 2
        note = f"{len(rows) - 2 * half} rows left out here: {where_all}"
        gap: list[object] = [_ELLIPSIS, "", note, *[""] * (len(head) - 3)]
        rows = [*rows[:half], gap, *rows[-half:]]
    return table(head, rows)


def starts(record: RunRecord) -> Iterator[Html]:
    """A table of the run's starts: where each ran, how long, and how it ended."""
    if len(record.starts) > 1:
        ends = [start.end or "cut off" for start in record.starts]
        ends[-1] = summary.outcome(record)
        rows = [_start_row(start, end) for start, end in zip(record.starts, ends, strict=True)]
        head = ["started", "from step", "to step", "seconds", "strategy", "devices", "ended"]
        yield element("h2", "Starts")
        yield _shortened_table(head, rows, _WHERE_ALL_ARE)


def _start_row(start: Start, end: str) -> list[object]:
    devices = summary.devices(start.plan)
    return [
        show_moment(start.time),
        start.step,
        start.last_step,
        show_seconds(max(0.0, start.last_time - start.time)),
        f"{start.plan.get('engine', '')} {start.plan.get('strategy', '')}",
        ", ".join(f"{count} x {name}" for name, count in devices.items()),
        end,
    ]


def evaluations(record: RunRecord) -> Iterator[Html]:
    if not record.evaluated:
        return
    names: dict[str, None] = {"loss": None}
    for event in record.evaluated:
        for name, value in event.values.items():
            if name not in summary.NOT_METRICS and not isinstance(value, list):
                names[name] = None
    rows: list[list[object]] = [
        [event.step, *(_show_finite(event.values.get(name)) for name in names)]
        for event in record.evaluated
    ]
    yield element("h2", "Evaluations")
    yield element(
        "details",
        element("summary", counted(len(rows), "evaluation")),
        _shortened_table(["step", *names], rows, _WHERE_ALL_ARE),
    )
    yield from _arrays(record.evaluated[-1], record)


def test(record: RunRecord) -> Iterator[Html]:
    """The result of the best checkpoint on the task's test data."""
    if not record.tested:
        return
    event = record.tested[-1]
    rows: list[list[object]] = [
        [name, _show_finite(value)]
        for name, value in event.values.items()
        if name not in BESIDE_METRICS and not isinstance(value, list)
    ]
    yield element("h2", "Test")
    yield element("p", f"The checkpoint of step {event.step}, on data that nothing was chosen by.")
    yield table([], rows, numbers=True)
    yield from _arrays(event, record)


def _arrays(event: Event, record: RunRecord) -> Iterator[Html]:
    """Small arrays of an evaluation as tables."""
    for name, value in event.values.items():
        if not isinstance(value, list):
            continue
        if is_confusion(value) and len(value) < _MAX_COLUMNS:
            yield element("h3", f"{name} at step {event.step}")
            yield from _confusion(value, record)
            continue
        rows = [row if isinstance(row, list) else [row] for row in value]
        if all(isinstance(row, list) for row in value):
            head = ["", *map(str, range(max(map(len, rows), default=0)))]
        else:
            head = ["", name]
        yield element("h3", f"{name} at step {event.step}")
        nested = any(isinstance(item, list) for row in rows for item in row)
        if nested or len(head) > _MAX_COLUMNS or len(rows) > _MAX_ROWS:
            yield element("p", "Too large for this page; journal.jsonl has it.", class_="quiet")
        else:
            cells = [[show_value(item) for item in row] for row in rows]
            yield table(head, [[str(index), *row] for index, row in enumerate(cells)], numbers=True)


def _confusion(matrix: list[list[int]], record: RunRecord) -> Iterator[Html]:
    """A confusion matrix, shaded by the share of each row, and a table of the classes."""
    reference = record.plan.reference if record.plan else {}
    names = class_names(reference, len(matrix))
    rows = []
    for name, counts in zip(names, matrix, strict=True):
        whole = max(1, sum(counts))
        shaded = [
            element("span", count, class_="share", style=f"--share: {count / whole:.3f}")
            for count in counts
        ]
        rows.append([name, *shaded])
    yield element("p", "Rows: the label. Columns: the answer.", class_="quiet")
    yield table(["", *names], rows, numbers=True)
    scores = [
        [
            score.name,
            score.samples,
            *(f"{share:.4f}" for share in (score.precision, score.recall, score.f1)),
        ]
        for score in class_scores(matrix, names)
    ]
    yield table(["", "samples", "precision", "recall", "F1"], scores, numbers=True)


def _show_finite(value: object) -> str:
    as_number = number(value)
    if math.isnan(as_number):
        return "not finite"
    return show_number(as_number)


def samples(record: RunRecord) -> Iterator[Html]:
    """The model's last samples and its first."""
    if not record.sampled:
        return
    yield element("h2", "Samples")
    events = [record.sampled[-1]]
    if len(record.sampled) > 1:
        events.append(record.sampled[0])
    for event in events:
        yield element("h3", f"at step {event.step}")
        for text in _list(event.values.get("texts"))[:_MAX_TEXTS]:
            yield element("pre", str(text)[:_MAX_TEXT])
        names = _list(event.values.get("pictures"))[:_MAX_PICTURES]
        yield element("div", *(_picture(record, name) for name in names), class_="figures")


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _picture(record: RunRecord, name: object) -> Html:
    """A PNG file of the run, inside the page.

    A file that is no PNG, is too large, or lies outside the run is only named.
    """
    content = _read_picture(record.directory, str(name))
    if content is None:
        limit = show_bytes(_MAX_PICTURE)
        text = f"{name}: not shown (no PNG file of this run, or larger than {limit})"
        return element("figure", element("figcaption", text))
    source = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    return element(
        "figure", element("img", src=source, alt=str(name)), element("figcaption", str(name))
    )


def _read_picture(run: Path, name: str) -> bytes | None:
    path = run / name
    try:
        if run.resolve() not in path.resolve().parents:
            return None
        content = read_file_bytes(path, _MAX_PICTURE)
    except (OSError, ValueError):
        return None
    if not content.startswith(_PNG):
        return None
    return content


def plan(record: RunRecord) -> Iterator[Html]:
    """The plan: every decision with its reason, and the expected memory."""
    reasons = record.plan_json.get("because")
    values: dict[str, str] = {}
    if record.plan:
        values = decisions(record.plan)
    yield element("h2", "Plan")
    if isinstance(reasons, dict):
        names = sorted(reasons, key=lambda name: name not in values)
        rows: list[list[object]] = [
            [name, values.get(name, ""), str(reasons[name])] for name in names
        ]
        yield table(["decision", "value", "because"], rows)
    if record.plan:
        terms: list[list[object]] = [
            [term.name, show_bytes(term.bytes), term.formula] for term in record.plan.memory
        ]
        yield element("h3", "Memory of each device, estimated")
        yield table(["term", "bytes", "formula"], terms)
    for name, formula in record.formulas.items():
        yield element("p", f"{name}: {formula}", class_="quiet")


def config(record: RunRecord) -> Iterator[Html]:
    """Config values and where each was set; defaults are folded away."""
    if not record.config:
        return
    were_set: list[list[object]] = []
    defaults: list[list[object]] = []
    for key, value in record.config.items():
        if key in record.origins:
            were_set.append([key, show_value(value), record.origins[key]])
        else:
            defaults.append([key, show_value(value)])
    yield element("h2", "Config")
    yield table(["key", "value", "from"], were_set)
    yield element(
        "details",
        element("summary", f"{len(defaults)} defaults"),
        table(["key", "value"], defaults),
    )


def environment(record: RunRecord) -> Iterator[Html]:
    values = summary.environment(record)
    yield element("h2", "Environment")
    if not values:
        text = "Not recorded: the run was started by an older version."
        yield element("p", text, class_="quiet")
        return
    yield table([], [[name, show_value(value, name)] for name, value in values.items()])


def checkpoints(record: RunRecord) -> Iterator[Html]:
    yield element("h2", "Checkpoints")
    if not record.checkpoints:
        yield element("p", "None is kept.", class_="quiet")
        return
    rows: list[list[object]] = []
    for checkpoint in record.checkpoints:
        loss = "" if math.isnan(checkpoint.loss) else show_number(checkpoint.loss)
        rows.append([checkpoint.path, checkpoint.step, show_bytes(checkpoint.bytes), loss])
    head = ["path", "step", "size", "validation loss"]
    yield _shortened_table(head, rows, "the run directory has them all")
