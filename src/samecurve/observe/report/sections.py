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
from samecurve.observe.report.words import figure, moment, plain
from samecurve.units import show_bytes, show_seconds

_MOST_ROWS = 300
_MOST_TEXTS, _MOST_TEXT = 8, 20_000
_MOST_PICTURES, _MOST_PICTURE = 8, 2 << 20  # bytes
_PNG = b"\x89PNG\r\n\x1a\n"
_SKIPPED = "\N{HORIZONTAL ELLIPSIS}"


def notes(story: RunRecord, name: str = "") -> Iterator[Html]:
    """What a reader must know before any figure: failed, cut off, nothing trained, files that can't
    be read. name: of the run, before each.
    """
    how = summary.outcome(story)
    said = {
        "cut off": (
            f"The last start ended without a word at step {story.starts[-1].last_step}: killed, or"
            " the machine went down."
            if story.starts
            else ""
        ),
        "running": "It is still running: the page is as of now.",
        "starting": "It is starting.",
        "not started": "Nothing was ever started here.",
    }
    if how == "failed":
        ended = story.starts[-1].ended
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
    if not story.trained and story.starts:
        yield element("p", f"{name}No step was trained, so there are no curves.", class_="note")
    elif story.trained and not story.evaluated:
        yield element("p", f"{name}It was never evaluated.", class_="quiet")
    if story.began:
        yield element("p", f"{name}It began from {story.began}.", class_="quiet")
    for fault in story.faults:
        yield element("p", name + fault, class_="note bad")


def plan_in_short(story: RunRecord) -> Iterator[Html]:
    if story.made:
        yield element("pre", "\n".join(banner(story.made)))


def happened(story: RunRecord) -> Iterator[Html]:
    """Resumes, restarts, warnings and ends, the oldest first."""
    rows = [[moment(event.time), event.step, event.kind, _text(event)] for event in story.told]
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
            f"{plain(values.get('steps'))} steps in"
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


def starts(story: RunRecord) -> Iterator[Html]:
    """Each go at the run: where, how long, how it ended."""
    if len(story.starts) > 1:
        yield element("h2", "Starts")
        yield from _cut(
            ["started", "from step", "to step", "seconds", "strategy", "devices", "ended"],
            [_start(start, start is story.starts[-1], story) for start in story.starts],
            "journal.jsonl has them all",
        )


def _start(start: Start, last: bool, story: RunRecord) -> list[object]:
    found = summary.devices(start.plan)
    how = start.end or (summary.outcome(story) if last else "cut off")
    return [
        moment(start.time),
        start.step,
        start.last_step,
        show_seconds(max(0.0, start.last_time - start.time)),
        f"{start.plan.get('engine', '')} {start.plan.get('strategy', '')}",
        ", ".join(f"{count} x {name}" for name, count in found.items()),
        how,
    ]


def evaluations(story: RunRecord) -> Iterator[Html]:
    if not story.evaluated:
        return
    names = list(
        dict.fromkeys(
            name
            for event in story.evaluated
            for name in event.values
            if name not in summary.NOT_METRICS
        )
    )
    rows: list[list[object]] = [
        [
            event.step,
            *(
                (
                    figure(value)
                    if (value := number(event.values.get(name), float("nan"))) == value
                    else "not finite"
                )
                for name in ("loss", *names)
            ),
        ]
        for event in story.evaluated
    ]
    yield element("h2", "Evaluations")
    yield element(
        "details",
        element("summary", f"{len(rows)} evaluation{'' if len(rows) == 1 else 's'}"),
        *_cut(["step", "loss", *names], rows, "journal.jsonl has them all"),
    )


def samples(story: RunRecord) -> Iterator[Html]:
    """What the model made last, and first."""
    if not story.sampled:
        return
    yield element("h2", "Samples")
    chosen = [story.sampled[-1], *([story.sampled[0]] if len(story.sampled) > 1 else [])]
    for event in chosen:
        yield element("h3", f"at step {event.step}")
        texts, pictures = event.values.get("texts"), event.values.get("pictures")
        for text in (texts if isinstance(texts, list) else [])[:_MOST_TEXTS]:
            yield element("pre", str(text)[:_MOST_TEXT])
        yield element(
            "div",
            *(
                _picture(story, found)
                for found in (pictures if isinstance(pictures, list) else [])[:_MOST_PICTURES]
            ),
            class_="figures",
        )


def _picture(story: RunRecord, name: object) -> Html:
    """A PNG file of the run, within the page; what is none, too large, or elsewhere is only named."""
    path, home = Path(story.home, str(name)), story.home.resolve()
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


def plan(story: RunRecord) -> Iterator[Html]:
    """Every decision with its reason, and what memory was expected."""
    because = story.plan.get("because")
    known = decisions(story.made) if story.made else {}
    yield element("h2", "Plan")
    if isinstance(because, dict):
        yield table(
            ["decision", "value", "because"],
            [
                [name, known.get(name, ""), str(because[name])]
                for name in sorted(because, key=lambda name: name not in known)
            ],
        )
    if story.made:
        rows: list[list[object]] = [
            [term.name, show_bytes(term.bytes), term.formula] for term in story.made.memory
        ]
        yield element("h3", "Memory of each device, estimated")
        yield table(["term", "bytes", "formula"], rows)
    for name, formula in story.formulas.items():
        yield element("p", f"{name}: {formula}", class_="quiet")


def config(story: RunRecord) -> Iterator[Html]:
    """What was given, with where; defaults folded away."""
    if not story.config:
        return
    given = [
        [key, plain(value), story.origins[key]]
        for key, value in story.config.items()
        if key in story.origins
    ]
    others = [
        [key, plain(value)] for key, value in story.config.items() if key not in story.origins
    ]
    yield element("h2", "Config")
    yield table(["key", "value", "from"], [list(row) for row in given])
    yield element(
        "details",
        element("summary", f"{len(others)} defaults"),
        table(["key", "value"], [list(row) for row in others]),
    )


def environment(story: RunRecord) -> Iterator[Html]:
    found = summary.environment(story)
    yield element("h2", "Environment")
    if not found:
        yield element("p", "Not recorded: the run was made by an older version.", class_="quiet")
        return
    yield table([], [[name, plain(value, name)] for name, value in found.items()])


def checkpoints(story: RunRecord) -> Iterator[Html]:
    yield element("h2", "Checkpoints")
    if not story.checkpoints:
        yield element("p", "None is kept.", class_="quiet")
        return
    rows: list[list[object]] = [
        [
            saved.path,
            saved.step,
            show_bytes(saved.bytes),
            figure(saved.loss) if saved.loss == saved.loss else "",
        ]
        for saved in story.checkpoints
    ]
    yield from _cut(
        ["path", "step", "size", "validation loss"], rows, "the run directory has them all"
    )
