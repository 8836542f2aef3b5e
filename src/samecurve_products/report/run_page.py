"""The page of one run.

Its blocks come in three lists: those at the head, which change while the run is live; the charts;
and those that stay as they are from the run's start on (plan, config, environment).
"""

import base64
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from samecurve.observe.pictures import png
from samecurve.observe.plan_text import decisions
from samecurve.seam import Event, banner, printable, show_bytes, show_seconds
from samecurve_products.report import blocks, summary
from samecurve_products.report.blocks import (
    Block,
    Cell,
    Page,
    Run,
    Tone,
    details,
    heading,
    table,
    text,
)
from samecurve_products.report.charts import charts
from samecurve_products.report.columns import columns_of
from samecurve_products.report.evaluation_blocks import (
    WHERE_ALL_ARE,
    evaluations,
    shortened_table,
    tested,
)
from samecurve_products.report.plan_blocks import memory_table, reasons_table
from samecurve_products.report.record import RunRecord, as_mapping
from samecurve_products.report.steps import number
from samecurve_products.report.words import show_moment, show_number, show_value, summary_rows

PictureSource = Callable[[str], str | None]  # a picture's src by its name; None: it is not shown

_MAX_TEXTS, _MAX_TEXT = 8, 20_000  # characters
_MAX_PICTURES, _MAX_PICTURE = 18, 2 << 20  # bytes
_MAX_PICTURES_BYTES = 16 << 20  # of all that a file holds
_MAX_BETWEEN = 10  # samples between the first and the last
_TONES: dict[str, Tone] = {
    "finished": "good",
    "failed": "bad",
    "cut off": "bad",
    "not started": "bad",
}
_OUTCOMES = {
    "running": "It is still running: the page is as of now.",
    "starting": "It is starting.",
    "not started": "Nothing was ever started here.",
}


def run_page(record: RunRecord, name: str, picture: PictureSource) -> Page:
    """The whole page of a run, with its numbers."""
    head = head_blocks(record, name, picture)
    sections = next(i for i, block in enumerate(head) if block["type"] == "heading")
    drawn = chart_blocks(record, name)
    shown = [*head[:sections], *drawn, *head[sections:], *static_blocks(record)]
    return {"title": name, "blocks": shown, "runs": [run_of(record, name)]}


def run_of(record: RunRecord, name: str, colour: int = 0) -> Run:
    return {"name": printable(name), "colour": colour, "columns": columns_of(record)}


def head_blocks(record: RunRecord, name: str, picture: PictureSource) -> list[Block]:
    """How the run went: outcome, summary, what happened, evaluations, samples."""
    rows = summary_rows(summary.summary(record))
    return [
        blocks.header(name, badge(record), str(record.directory)),
        *notes(record),
        blocks.cards((title, *row) for title, row in rows.items() if row[0]),
        *plan_in_short(record),
        *happened(record),
        *_starts(record),
        *evaluations(record),
        *tested(record),
        *samples(record, picture),
        *_checkpoints(record),
    ]


def chart_blocks(record: RunRecord, name: str) -> list[Block]:
    return [heading("Charts"), *charts([record], [name])]


def static_blocks(record: RunRecord) -> list[Block]:
    """The facts that were known when the run started: plan, config, environment."""
    return [*_plan(record), *_config(record), *_environment(record)]


def badge(record: RunRecord) -> tuple[str, Tone]:
    how = summary.outcome(record)
    return how, _TONES.get(how, "accent")


def notes(record: RunRecord, name: str = "") -> Iterator[Block]:
    """Notes that come before any number: failed, cut off, nothing trained, damaged files.

    name: of the run, before each note
    """
    how = summary.outcome(record)
    if how == "failed":
        yield text(_failure(record.starts[-1].end_values), "bad", title=f"{name}Failed:")
    elif how == "cut off":
        words = f"{name}The last start ended without a word at step {record.starts[-1].last_step}"
        yield text(f"{words}: killed, or the machine went down.", "warn")
    elif how in _OUTCOMES:
        yield text(name + _OUTCOMES[how], "quiet")
    if not len(record.steps) and record.starts:
        words = f"{name}No step was trained, so there are no curves."
        yield text(words, "quiet" if record.live else "warn")
    elif len(record.steps) and not record.evaluated:
        yield text(f"{name}It was never evaluated.", "quiet")
    if record.began_from:
        yield text(f"{name}It began from {record.began_from}.", "quiet")
    for fault in record.faults:
        yield text(name + fault, "bad")


def _failure(values: Mapping[str, object]) -> str:
    return " Remedy: ".join(str(values[name]) for name in ("cause", "remedy") if values.get(name))


def plan_in_short(record: RunRecord) -> Iterator[Block]:
    if record.plan:
        yield blocks.pre("\n".join(banner(record.plan)))


def happened(record: RunRecord) -> Iterator[Block]:
    """Resumes, restarts, warnings and ends, the oldest first."""
    rows: list[list[Cell]] = [
        [show_moment(event.time), event.step, event.kind, _describe(event)]
        for event in record.notable
    ]
    if rows:
        yield heading("What happened")
        yield shortened_table(["when", "step", "what", ""], rows, WHERE_ALL_ARE)


def _describe(event: Event) -> str:
    values = event.values
    if event.kind == "failed":
        return _failure(values)
    if event.kind in {"finished", "stopped"}:
        seconds = show_seconds(number(values.get("seconds"), 0.0))
        goodput = number(values.get("goodput"), 0.0)
        return f"{show_value(values.get('steps'))} steps in {seconds}, goodput {goodput:.0%}"
    return str(values.get("text", ""))


def _starts(record: RunRecord) -> Iterator[Block]:
    """A table of the run's starts: where each ran, how long, and how it ended."""
    starts = record.starts
    if len(starts) > 1:
        ends = [start.end or "cut off" for start in starts[:-1]] + [summary.outcome(record)]
        rows: list[list[Cell]] = []
        for start, end in zip(starts, ends, strict=True):
            seconds = show_seconds(start.wall_seconds)
            steps = (start.step, start.last_step)
            rows.append([show_moment(start.time), *steps, seconds, start.how, start.devices, end])
        head = ["started", "from step", "to step", "seconds", "strategy", "devices", "ended"]
        yield heading("Starts")
        yield shortened_table(head, rows, WHERE_ALL_ARE)


def samples(record: RunRecord, picture: PictureSource) -> Iterator[Block]:
    """The model's samples over time: the last, the first, and folded away some between."""
    if not record.sampled:
        return
    yield heading("Samples")
    last, *others = list(record.sampled)[::-1]
    yield from _sample(last, picture)
    if others:
        yield from _sample(others[-1], picture)
    between = others[:-1][:: 1 + len(others) // _MAX_BETWEEN]
    if between:
        shown = [block for event in between for block in _sample(event, picture)]
        yield details(f"{len(between)} samples between", shown)


def _sample(event: Event, picture: PictureSource) -> Iterator[Block]:
    yield heading(f"at step {event.step}", 3)
    for words in _list(event.values.get("texts"))[:_MAX_TEXTS]:
        yield blocks.pre(str(words)[:_MAX_TEXT], wrap=True)
    names = map(str, _list(event.values.get("pictures"))[:_MAX_PICTURES])
    sources = {name: picture(name) for name in names}
    shown = [(name, source) for name, source in sources.items() if source]
    if shown:
        yield blocks.pictures(shown)
    for name, source in sources.items():
        if not source:
            yield text(f"{name}: not shown (no PNG file of this run, or too large)", "quiet")


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def picture_data(run: Path) -> PictureSource:
    """Sources that hold the pictures themselves, for a page in one file that is not too large."""
    room = _MAX_PICTURES_BYTES

    def source(name: str) -> str | None:
        nonlocal room
        try:
            content = png(run, name, min(room, _MAX_PICTURE))
        except (OSError, ValueError):
            return None
        room -= len(content)
        return f"data:image/png;base64,{base64.b64encode(content).decode()}"

    return source


def _plan(record: RunRecord) -> Iterator[Block]:
    """The plan: every decision with its reason, and the expected memory."""
    yield heading("Plan")
    if reasons := as_mapping(record.plan_json.get("because")):
        yield reasons_table(reasons, decisions(record.plan) if record.plan else {})
    if record.plan:
        yield heading("Memory of each device, estimated", 3)
        yield memory_table(record.plan.memory)
    for name, formula in record.formulas.items():
        yield text(f"{name}: {formula}", "quiet")


def _config(record: RunRecord) -> Iterator[Block]:
    """Config values and where each was set; defaults are folded away."""
    if not record.config:
        return
    yield heading("Config")
    shown = {key: show_value(value) for key, value in record.config.items()}
    were_set = [[k, shown[k], record.origins[k]] for k in shown if k in record.origins]
    defaults = [[key, value] for key, value in shown.items() if key not in record.origins]
    yield table(["key", "value", "from"], were_set)
    yield details(f"{len(defaults)} defaults", [table(["key", "value"], defaults)])


def _environment(record: RunRecord) -> Iterator[Block]:
    values = summary.environment(record)
    yield heading("Environment")
    if values:
        yield table([], [[name, show_value(value, name)] for name, value in values.items()])
    else:
        yield text("Not recorded: the run was started by an older version.", "quiet")


def _checkpoints(record: RunRecord) -> Iterator[Block]:
    yield heading("Checkpoints")
    if not record.checkpoints:
        yield text("None is kept.", "quiet")
        return
    rows: list[list[Cell]] = []
    for checkpoint in record.checkpoints:
        loss = "" if math.isnan(checkpoint.loss) else show_number(checkpoint.loss)
        rows.append([checkpoint.path, checkpoint.step, show_bytes(checkpoint.bytes), loss])
    head = ["path", "step", "size", "validation loss"]
    yield shortened_table(head, rows, "the run directory has them all")
