"""Blocks: the parts of a page as data, drawn by report/page/*.js in the browser.

All texts are plain text, never markup. A text with invisible characters shows them as escapes, so
that a run's texts can't turn or hide what a reader sees.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict

from samecurve.seam import printable

Tone = Literal["good", "bad", "warn", "accent", "quiet"]
Colour = int | Literal["bad", "quiet"]  # a number is that of a series
Array = Mapping[str, str] | Sequence[float | None]
Part = tuple[str, float, Colour]  # of a bar: label, value, colour
Span = tuple[str, Literal["loss", "quiet"] | None]  # of a text; loss: it counts in the loss
Block = Mapping[str, Any]  # what a function below returns, as JSON has it

COLOURS = 8  # series colours; more series repeat them with another dash


class RichCell(TypedDict):
    """A cell of a table with more than a text."""

    text: str
    note: NotRequired[str]
    tone: NotRequired[Tone]
    share: NotRequired[float]  # 0 to 1: how dark it is shaded


Cell = str | int | float | RichCell


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


class Bar(NamedTuple):
    """A row of bars: its parts, and the values to compare them with."""

    label: str
    parts: Sequence[Part]
    limit: float | None = None
    mark: tuple[str, float] | None = None  # label, value


class Run(TypedDict):
    name: str
    colour: int
    columns: Mapping[str, Any]


class Page(TypedDict):
    title: str
    blocks: Sequence[Block]
    runs: Sequence[Run]


def header(title: str, badge: tuple[str, Tone] | None = None, quiet: str = "") -> Block:
    shown = {"text": badge[0], "tone": badge[1]} if badge else None
    return _block("header", title=title, badge=shown, quiet=quiet)


def heading(text: str, level: Literal[2, 3] = 2) -> Block:
    return _block("heading", text=text, level=level)


def text(words: str, tone: Tone | None = None, title: str = "") -> Block:
    """A paragraph; with the tone bad, warn or good a boxed note."""
    return _block("text", text=words, tone=tone, title=title)


def cards(items: Iterable[tuple[str, str, str]]) -> Block:
    """Cards, each with a title, a value and a note, which may be ''."""
    shown = [{"title": title, "value": value, "note": note} for title, value, note in items]
    return _block("cards", items=shown)


def table(head: Sequence[str], rows: Iterable[Sequence[Cell]], *, numbers: bool = False) -> Block:
    """A table. The first cell of a row is its header. numbers: align all others to the right."""
    shown = [[_finite(cell) for cell in row] for row in rows]
    return _block("table", head=head, rows=shown, numbers=numbers)


def _finite(cell: Cell) -> Cell:
    return str(cell) if isinstance(cell, float) and not math.isfinite(cell) else cell


def pre(words: str, *, wrap: bool = False) -> Block:
    return _block("pre", text=words, wrap=wrap)


def spans(lines: Iterable[Iterable[Span]], caption: str) -> Block:
    shown = [[{"text": words, "tone": tone} for words, tone in line] for line in lines]
    return _block("spans", lines=shown, caption=caption)


def details(summary: str, blocks: Sequence[Block], *, is_open: bool = False) -> Block:
    return _block("details", summary=summary, blocks=blocks, open=is_open)


def pictures(items: Iterable[tuple[str, str]]) -> Block:
    """Pictures, each with its caption before its source."""
    return _block("pictures", items=[{"caption": words, "src": src} for words, src in items])


def chart(
    name: str,
    title: str,
    lines: Sequence[Line],
    *,
    y: str | Mapping[str, Any],
    note: str = "",
    **more: Any,
) -> Block:
    """A chart. y: a format, or the whole description of the axis. more: x, smooth, marks."""
    axis = {"format": y} if isinstance(y, str) else y
    return _block("chart", name=name, title=title, note=note, y=axis, lines=lines, **more)


def bars(name: str, title: str, rows: Iterable[Bar], *, form: str, note: str = "") -> Block:
    """Horizontal stacked bars. form: the format of the values."""
    shown = [
        {
            "label": bar.label,
            "parts": [dict(zip(("label", "value", "colour"), p, strict=True)) for p in bar.parts],
            "limit": bar.limit,
            "marks": [{"label": bar.mark[0], "value": bar.mark[1]}] if bar.mark else [],
        }
        for bar in rows
    ]
    return _block("bars", name=name, title=title, note=note, format=form, rows=shown)


def _block(kind: str, /, **values: Any) -> Block:
    return {"type": kind, **_printable(values)}


def _printable(value: Any) -> Any:
    """The value with each of its texts printable; keys that are None are left out."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {key: _printable(item) for key, item in value.items() if item is not None}
    return [_printable(item) for item in value] if isinstance(value, list | tuple) else value
