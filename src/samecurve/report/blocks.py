"""Blocks: the parts of a page as data, drawn by report/page/*.js in the browser.

All texts are plain text, never markup. A text with invisible characters shows them as escapes, so
that a run's texts can't turn or hide what a reader sees.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired, TypedDict

from samecurve.terminal import printable

Tone = Literal["good", "bad", "warn", "accent", "quiet"]
Colour = int | Literal["bad", "quiet"]
Block = Mapping[str, Any]  # one of the blocks below, as JSON has it
Array = Mapping[str, str] | Sequence[float | None]

COLOURS = 8  # series colours; more series repeat them with another dash


class RichCell(TypedDict):
    """A cell of a table with more than a text."""

    text: str
    note: NotRequired[str]
    tone: NotRequired[Tone]
    share: NotRequired[float]  # 0 to 1: how dark it is shaded
    href: NotRequired[str]  # within the page: "#/..."


Cell = str | int | float | RichCell


class Card(TypedDict):
    title: str
    value: str
    note: NotRequired[str]


class Span(TypedDict):
    text: str
    tone: NotRequired[Literal["loss", "quiet", "bad"]]


class Picture(TypedDict):
    caption: str
    src: str


class Line(TypedDict, total=False):
    """A line of a chart: a column of a run, or numbers of its own."""

    label: str
    colour: int
    run: int
    column: str
    x: Array
    y: Array
    low: Array
    high: Array
    errors: tuple[Array, Array]
    dash: int
    points: bool
    width: float


class Mark(TypedDict):
    """Something that happened to a run at a step, at the lower edge of a chart."""

    run: int
    step: int
    kind: str
    text: str


class Part(TypedDict):
    label: str
    value: float
    colour: Colour


class Bar(TypedDict):
    label: str
    parts: Sequence[Part]
    limit: NotRequired[float]
    marks: NotRequired[Sequence[Mapping[str, Any]]]  # label, value


class Run(TypedDict):
    name: str
    colour: int
    columns: Mapping[str, Any]


class Page(TypedDict):
    title: str
    blocks: Sequence[Block]
    runs: Sequence[Run]


def header(title: str, badge: tuple[str, Tone] | None = None, quiet: str = "") -> Block:
    block = {"type": "header", "title": printable(title), "quiet": printable(quiet)}
    if badge is None:
        return block
    return {**block, "badge": {"text": printable(badge[0]), "tone": badge[1]}}


def heading(text: str, level: Literal[2, 3] = 2) -> Block:
    return {"type": "heading", "text": printable(text), "level": level}


def text(words: str, tone: Tone | None = None, title: str = "") -> Block:
    """A paragraph; with the tone bad, warn or good a boxed note."""
    block: dict[str, Any] = {"type": "text", "text": printable(words)}
    if tone:
        block["tone"] = tone
    if title:
        block["title"] = printable(title)
    return block


def cards(items: Sequence[Card]) -> Block:
    return {"type": "cards", "items": [_printable(item) for item in items]}


def table(head: Sequence[str], rows: Sequence[Sequence[Cell]], *, numbers: bool = False) -> Block:
    """A table. The first cell of a row is its header. numbers: align all others to the right."""
    return {
        "type": "table",
        "head": [printable(title) for title in head],
        "rows": [[_cell(cell) for cell in row] for row in rows],
        "numbers": numbers,
    }


def _cell(cell: Cell) -> Any:
    if isinstance(cell, str):
        return printable(cell)
    if isinstance(cell, dict):
        return _printable(cell)
    return cell if math.isfinite(cell) else str(cell)


def pre(words: str, *, wrap: bool = False) -> Block:
    return {"type": "pre", "text": printable(words), "wrap": wrap}


def spans(lines: Sequence[Sequence[Span]], caption: str = "") -> Block:
    shown = [[_printable(span) for span in line] for line in lines]
    return {"type": "spans", "lines": shown, "caption": printable(caption)}


def details(summary: str, blocks: Sequence[Block], *, is_open: bool = False) -> Block:
    return {"type": "details", "summary": printable(summary), "blocks": blocks, "open": is_open}


def columns(left: Sequence[Block], right: Sequence[Block]) -> Block:
    return {"type": "columns", "blocks": [left, right]}


def pictures(items: Sequence[Picture], size: Literal["small", "large"] = "small") -> Block:
    return {"type": "pictures", "items": [_printable(item) for item in items], "size": size}


def chart(
    name: str,
    title: str,
    lines: Sequence[Line],
    *,
    y: str | Mapping[str, Any],
    note: str = "",
    marks: Sequence[Mark] = (),
    **more: Any,
) -> Block:
    """A chart. y: a format, or the whole description of the axis. more: group, x, smooth."""
    return {
        "type": "chart",
        "name": name,
        "title": printable(title),
        "note": printable(note),
        "y": {"format": y} if isinstance(y, str) else y,
        "lines": [{**line, "label": printable(line["label"])} for line in lines],
        "marks": [_printable(mark) for mark in marks],
        **more,
    }


def bars(name: str, title: str, rows: Sequence[Bar], *, form: str, note: str = "") -> Block:
    """Horizontal stacked bars. form: the format of the values."""
    shown = [
        {
            **row,
            "label": printable(row["label"]),
            "parts": [{**part, "label": printable(part["label"])} for part in row["parts"]],
        }
        for row in rows
    ]
    return {
        "type": "bars",
        "name": name,
        "title": printable(title),
        "note": printable(note),
        "format": form,
        "rows": shown,
    }


def _printable(texts: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: printable(value) if isinstance(value, str) else value for name, value in texts.items()
    }
