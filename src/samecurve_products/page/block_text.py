"""Blocks of a page as text for a terminal, a pipe or a log.

The page itself draws the same blocks. Nothing of a block's text can move the cursor or colour a
line: characters that could are shown as escapes.
"""

import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from samecurve.seam import printable
from samecurve.terminal import width_of, wrapped

# Any: blocks are JSON, of many forms
Block = Mapping[str, Any]

_WIDTH = 80  # columns of a pipe
_BARS = " ▁▂▃▄▅▆▇█"
_RESET = "\x1b[0m"
_COLOURS = {"loss": "\x1b[1;32m", "quiet": "\x1b[2m", "bad": "\x1b[31m"}
_MARKS = {"loss": ("⟦", "⟧"), "bad": ("⟦", "⟧")}  # where there are no colours
_LABEL, _EXTENT = 16, 22  # characters of a curve's name, and of its range


class BlockText:
    """Writes blocks as text. coloured: tones are colours; False: marks"""

    def __init__(self, *, coloured: bool, width: int | None = None) -> None:
        self._coloured = coloured
        self._width = width or width_of(sys.stdout) or _WIDTH
        self._said = False  # what the marks mean

    def show(self, blocks: Sequence[Block]) -> str:
        shown = ""
        for number, block in enumerate(blocks):
            text = self._block(block)
            follows = number and block["type"] == blocks[number - 1]["type"] == "text"
            gap = "\n" if follows else "\n\n"
            shown += f"{gap if shown else ''}{text}"
        return shown

    def _block(self, block: Block) -> str:
        writers = {
            "heading": self._heading,
            "text": self._text,
            "cards": self._cards,
            "table": self._table,
            "spans": self._spans,
            "chart": self._chart,
            "bars": self._bars,
            "pictures": self._pictures,
        }
        return writers[block["type"]](block)

    def _heading(self, block: Block) -> str:
        text = _line(block["text"])
        return f"\x1b[1m{text}{_RESET}" if self._coloured else f"{text}\n{'-' * len(text)}"

    def _text(self, block: Block) -> str:
        mark = {"warn": "warn   ", "bad": "error  "}.get(block.get("tone", ""), "")
        return wrapped(mark + printable(block["text"]), self._width)

    def _cards(self, block: Block) -> str:
        rows = [
            (_line(c["title"]), _line(c["value"]), _line(c.get("note", ""))) for c in block["items"]
        ]
        titles, values = (max((len(row[n]) for row in rows), default=0) for n in (0, 1))
        return "\n".join(
            f"{title:<{titles}}  {value:>{values}}  {note}".rstrip() for title, value, note in rows
        )

    def _table(self, block: Block) -> str:
        from samecurve.seam import Column, table_text

        rows = [[_cell(cell) for cell in row] for row in block["rows"]]
        columns = [Column(_cell(cell)) for cell in block["head"]]
        return table_text(columns, rows, indent=0)

    def _spans(self, block: Block) -> str:
        """The caption, and the lines below it; tones as colours, or the trained parts in marks."""
        lines = [_line(block.get("caption", ""))]
        if not self._coloured and not self._said and _has_loss(block):
            self._said = True
            lines.append("(⟦ ⟧: what is trained on)")
        for line in block["lines"]:
            lines += self._folded(line)
        return "\n".join(lines)

    def _folded(self, line: Sequence[Block]) -> list[str]:
        """A line of pieces, folded to the width."""
        shown, room = [""], self._width - 2
        for piece in line:
            tone = piece.get("tone", "")
            before, after = _MARKS.get(tone, ("", ""))
            if self._coloured:
                before, after = _COLOURS.get(tone, ""), _RESET if tone in _COLOURS else ""
            text = printable(piece["text"].expandtabs(4))
            wide = 0 if self._coloured else len(before)
            while text:
                if room <= 2 * wide:
                    shown.append("")
                    room = self._width - 2
                part = _fitting(text, room - 2 * wide, is_begin=room == self._width - 2)
                if part:
                    shown[-1] += f"{before}{part}{after}"
                text, room = text[len(part) :], room - len(part) - 2 * wide
                if text:
                    room = 0
        return [f"  {each}".rstrip() for each in shown]

    def _chart(self, block: Block) -> str:
        lines = [_line(f"{block['title']} ({block['y'].get('label', '')})")]
        if block.get("note"):
            lines[0] += f", {_line(block['note'])}"
        for line in block["lines"]:
            numbers = [number for number in line["y"] if number is not None]
            extent = f"{min(numbers):.4g} to {max(numbers):.4g}" if numbers else "no number"
            room = self._width - 2 - _LABEL - _EXTENT - 3
            label = _line(line["label"])[:_LABEL]
            lines.append(f"  {label:<{_LABEL}} {sparkline(line['y'], room):<{room}}  {extent}")
        return "\n".join(lines)

    def _bars(self, block: Block) -> str:
        title = _line(block["title"]) + (f", {_line(block['note'])}" if block.get("note") else "")
        rows = [
            (_line(row["label"]), sum(part["value"] for part in row["parts"]))
            for row in block["rows"]
        ]
        labels = min(max((len(label) for label, _ in rows), default=0), self._width // 3)
        most = max((value for _, value in rows), default=0) or 1
        counts = max((len(f"{value:,}") for _, value in rows), default=1)
        room = max(8, self._width - labels - counts - 6)
        lines = [
            f"  {label[:labels]:<{labels}}  {value:>{counts},} {_bar(value / most, room)}".rstrip()
            for label, value in rows
        ]
        return "\n".join([title, *lines])

    def _pictures(self, block: Block) -> str:
        captions = [item["caption"].split("\n") for item in block["items"]]
        return "\n".join(f"picture  {_line(': '.join(lines))}" for lines in captions)


def sparkline(values: Sequence[float | None], width: int) -> str:
    """A curve as a line of blocks, lowest to highest; a gap where there is no number.

    Each block is the mean of the values that fall on it.
    """
    count = min(width, len(values))
    if count < 1:
        return ""
    edges = [len(values) * place // count for place in range(count + 1)]
    parts = [
        [value for value in values[begin:end] if value is not None]
        for begin, end in pairwise(edges)
    ]
    means = [sum(part) / len(part) if part else None for part in parts]
    known = [mean for mean in means if mean is not None]
    low, extent = min(known, default=0.0), max(known, default=0.0) - min(known, default=0.0)
    most = len(_BARS) - 2
    return "".join(
        " " if mean is None else _BARS[1 + round((mean - low) / extent * most) if extent else 4]
        for mean in means
    )


def _fitting(text: str, room: int, *, is_begin: bool) -> str:
    """The beginning of a text that fits, cut behind a blank; "" if it is to begin the next line."""
    if len(text) <= room:
        return text
    place = text.rfind(" ", 0, room) + 1
    if place:
        return text[:place]
    return text[:room] if is_begin else ""


def _has_loss(block: Block) -> bool:
    return any(piece.get("tone") == "loss" for line in block["lines"] for piece in line)


def _bar(share: float, room: int) -> str:
    return "█" * round(share * room) or ("▏" if share else "")


def _cell(cell: object) -> str:
    return _line(cell["text"] if isinstance(cell, Mapping) else cell)


def _line(text: object) -> str:
    """Make a text one printable line."""
    return printable(str(text)).replace("\n", " ").replace("\t", " ")
