"""The parts of a run's page below its figures.

Each gives its elements, or nothing where there is nothing to say.
"""

import base64
from collections.abc import Iterator
from pathlib import Path

from samecurve.core.events import Event
from samecurve.observe.plan_text import banner, decisions
from samecurve.observe.report import summary
from samecurve.observe.report.markup import Html, element, table
from samecurve.observe.report.reading import RunRecord, Start, number
from samecurve.observe.report.words import show_moment, show_number, show_value
from samecurve.units import show_bytes, show_seconds

_MOST_ROWS = 300
_MOST_COLUMNS = 65  # of an array of an evaluation, its first column the row numbers
_MOST_TEXTS, _MOST_TEXT = 8, 20_000
_MOST_PICTURES, _MOST_PICTURE = 8, 2 << 20  # bytes
_PNG = b"\x89PNG\r\n\x1a\n"
_SKIPPED = "\N{HORIZONTAL ELLIPSIS}"


def notes(record: RunRecord, name: str = "") -> Iterator[Html]:
    """What a reader must know before any figure: failed, cut off, nothing trained, files that can't
    be read. name: of the run, before each.
    """
    how = summary.outcome(record)
    said = {
        "cut off": (
            f"The last start ended without a word at step {record.starts[-1].last_step}: killed, or"
            " the machine went down."
            if record.starts
            else ""
        ),
        "running": "It is still running: the page is as of now.",
        "starting": "It is starting.",
        "not started": "Nothing was ever started here.",
    }
    if how == "failed":
        ended = record.starts[-1].end_values
        yield element(
            "p",
            name,
            element("b", "Failed: "),
            str(ended.get("cause", "")),
            f" Remedy: {ended['remedy']}" if ended.get("remedy") else "",
            class_="note bad",
        )
    elif said.get(how):
        yield element("p", name + said[how], class_="note")
    if not record.num_steps and record.starts:
        yield element("p", f"{name}No step was trained, so there are no curves.", class_="note")
    elif record.num_steps and not record.evaluated:
        yield element("p", f"{name}It was never evaluated.", class_="quiet")
    if record.began_from:
        yield element("p", f"{name}It began from {record.began_from}.", class_="quiet")
    for fault in record.faults:
        yield element("p", name + fault, class_="note bad")


def plan_in_short(record: RunRecord) -> Iterator[Html]:
    if record.plan:
        yield element("pre", "\n".join(banner(record.plan)))


def happened(record: RunRecord) -> Iterator[Html]:
    """Resumes, restarts, warnings and ends, the oldest first."""
    rows = [
        [show_moment(event.time), event.step, event.kind, _text(event)] for event in record.notable
    ]
    if rows:
        yield element("h2", "What happened")
        yield from _cut(["when", "step", "what", ""], rows, "journal.jsonl has them all")


def _text(event: Event) -> str:
    values = event.values
    if event.kind == "failed":
        return " Remedy: ".join(
            str(values[name]) for name in ("cause", "remedy") if values.get(name)
        )
    if event.kind in {"finished", "stopped"}:
        return (
            f"{show_value(values.get('steps'))} steps in"
            f" {show_seconds(number(values.get('seconds'), 0.0))}, goodput"
            f" {number(values.get('goodput'), 0.0):.0%}"
        )
    return str(values.get("text", ""))


def _cut(head: list[str], rows: list[list[object]], more: str) -> Iterator[Html]:
    """A table whose middle is left out where it is very long."""
    if len(rows) > _MOST_ROWS:
        half = _MOST_ROWS // 2
        left = len(rows) - 2 * half
        rows = [
            *rows[:half],
            [_SKIPPED, "", f"{left} rows left out here: {more}", *[""] * (len(head) - 3)],
            *rows[-half:],
        ]
    yield table(head, rows)


def starts(record: RunRecord) -> Iterator[Html]:
    """Each go at the run: where, how long, how it ended."""
    if len(record.starts) > 1:
        yield element("h2", "Starts")
        yield from _cut(
            ["started", "from step", "to step", "seconds", "strategy", "devices", "ended"],
            [_start(start, start is record.starts[-1], record) for start in record.starts],
            "journal.jsonl has them all",
        )


def _start(start: Start, last: bool, record: RunRecord) -> list[object]:
    found = summary.devices(start.plan)
    how = start.end or (summary.outcome(record) if last else "cut off")
    return [
        show_moment(start.time),
        start.step,
        start.last_step,
        show_seconds(max(0.0, start.last_time - start.time)),
        f"{start.plan.get('engine', '')} {start.plan.get('strategy', '')}",
        ", ".join(f"{count} x {name}" for name, count in found.items()),
        how,
    ]


def evaluations(record: RunRecord) -> Iterator[Html]:
    if not record.evaluated:
        return
    names = list(
        dict.fromkeys(
            name
            for event in record.evaluated
            for name, value in event.values.items()
            if name not in summary.NOT_METRICS and not isinstance(value, list)
        )
    )
    rows: list[list[object]] = [
        [
            event.step,
            *(
                (
                    show_number(value)
                    if (value := number(event.values.get(name), float("nan"))) == value
                    else "not finite"
                )
                for name in ("loss", *names)
            ),
        ]
        for event in record.evaluated
    ]
    yield element("h2", "Evaluations")
    yield element(
        "details",
        element("summary", f"{len(rows)} evaluation{'' if len(rows) == 1 else 's'}"),
        *_cut(["step", "loss", *names], rows, "journal.jsonl has them all"),
    )
    yield from _arrays(record.evaluated[-1])


def _arrays(event: Event) -> Iterator[Html]:
    """The arrays of an evaluation, such as a confusion matrix, as tables where they are small."""
    for name, value in event.values.items():
        if not isinstance(value, list):
            continue
        rows = [row if isinstance(row, list) else [row] for row in value]
        if all(isinstance(row, list) for row in value):
            head = ["", *map(str, range(max(map(len, rows), default=0)))]
        else:
            head = ["", name]
        yield element("h3", f"{name} at step {event.step}")
        nested = any(isinstance(item, list) for row in rows for item in row)
        if nested or len(head) > _MOST_COLUMNS or len(rows) > _MOST_ROWS:
            yield element("p", "Too large for this page; journal.jsonl has it.", class_="quiet")
        else:
            cells = [[show_value(item) for item in row] for row in rows]
            yield table(head, [[str(index), *row] for index, row in enumerate(cells)], numbers=True)


def samples(record: RunRecord) -> Iterator[Html]:
    """What the model made last, and first."""
    if not record.sampled:
        return
    yield element("h2", "Samples")
    chosen = [record.sampled[-1], *([record.sampled[0]] if len(record.sampled) > 1 else [])]
    for event in chosen:
        yield element("h3", f"at step {event.step}")
        texts, pictures = event.values.get("texts"), event.values.get("pictures")
        for text in (texts if isinstance(texts, list) else [])[:_MOST_TEXTS]:
            yield element("pre", str(text)[:_MOST_TEXT])
        yield element(
            "div",
            *(
                _picture(record, found)
                for found in (pictures if isinstance(pictures, list) else [])[:_MOST_PICTURES]
            ),
            class_="figures",
        )


def _picture(record: RunRecord, name: object) -> Html:
    """A PNG file of the run, within the page; what is none, too large, or elsewhere is only named."""
    path, home = Path(record.directory, str(name)), record.directory.resolve()
    try:
        found = (
            path.read_bytes()
            if home in path.resolve().parents and path.stat().st_size <= _MOST_PICTURE
            else b""
        )
    except (OSError, ValueError):
        found = b""
    if not found.startswith(_PNG):
        return element(
            "figure",
            element(
                "figcaption",
                f"{name}: not shown (no PNG file of this run, or larger than"
                f" {show_bytes(_MOST_PICTURE)})",
            ),
        )
    return element(
        "figure",
        element(
            "img", src=f"data:image/png;base64,{base64.b64encode(found).decode()}", alt=str(name)
        ),
        element("figcaption", str(name)),
    )


def plan(record: RunRecord) -> Iterator[Html]:
    """Every decision with its reason, and what memory was expected."""
    because = record.plan_json.get("because")
    known = decisions(record.plan) if record.plan else {}
    yield element("h2", "Plan")
    if isinstance(because, dict):
        yield table(
            ["decision", "value", "because"],
            [
                [name, known.get(name, ""), str(because[name])]
                for name in sorted(because, key=lambda name: name not in known)
            ],
        )
    if record.plan:
        rows: list[list[object]] = [
            [term.name, show_bytes(term.bytes), term.formula] for term in record.plan.memory
        ]
        yield element("h3", "Memory of each device, estimated")
        yield table(["term", "bytes", "formula"], rows)
    for name, formula in record.formulas.items():
        yield element("p", f"{name}: {formula}", class_="quiet")


def config(record: RunRecord) -> Iterator[Html]:
    """What was given, with where; defaults folded away."""
    if not record.config:
        return
    given = [
        [key, show_value(value), record.origins[key]]
        for key, value in record.config.items()
        if key in record.origins
    ]
    others = [
        [key, show_value(value)]
        for key, value in record.config.items()
        if key not in record.origins
    ]
    yield element("h2", "Config")
    yield table(["key", "value", "from"], [list(row) for row in given])
    yield element(
        "details",
        element("summary", f"{len(others)} defaults"),
        table(["key", "value"], [list(row) for row in others]),
    )


def environment(record: RunRecord) -> Iterator[Html]:
    found = summary.environment(record)
    yield element("h2", "Environment")
    if not found:
        yield element("p", "Not recorded: the run was made by an older version.", class_="quiet")
        return
    yield table([], [[name, show_value(value, name)] for name, value in found.items()])


def checkpoints(record: RunRecord) -> Iterator[Html]:
    yield element("h2", "Checkpoints")
    if not record.checkpoints:
        yield element("p", "None is kept.", class_="quiet")
        return
    rows: list[list[object]] = [
        [
            saved.path,
            saved.step,
            show_bytes(saved.bytes),
            show_number(saved.loss) if saved.loss == saved.loss else "",
        ]
        for saved in record.checkpoints
    ]
    yield from _cut(
        ["path", "step", "size", "validation loss"], rows, "the run directory has them all"
    )
