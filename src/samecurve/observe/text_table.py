"""Tables of text: aligned columns for a terminal, a pipe or a log.

A terminal that is too narrow folds the last column. If that is not enough, each row becomes a block
with one `title  value` line for each column. Pipes and logs get whole lines of any length. So the
column whose values may be long stands last: no other row is wider for it.
"""

import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from samecurve.terminal import printable, width_of

if TYPE_CHECKING:
    from rich.table import Table

_UNLIMITED = 1 << 16  # characters of a line that goes to a pipe or a file
_LEAST = 10  # characters of a line, at least: a terminal that is narrower wraps them itself
_LEAST_BESIDE = 6  # characters of a value beside its title


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    title: str
    right: bool = False  # a number
    width: int = 0  # characters, at least: aligns rows that are shown one by one


def table_text(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    *,
    indent: int = 2,
    titles: bool = True,
) -> str:
    """The rows below their titles, as lines.

    indent: spaces before each line.
    titles: False leaves the line of titles out, for a row that follows others of its table.
    """
    from rich.console import Console  # late: a run that shows no table needs none of it
    from rich.measure import Measurement
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    width = width_of(sys.stdout)
    room = _UNLIMITED if width is None else max(width - indent, _LEAST)
    output = io.StringIO()
    terminal = Console(file=output, width=room, color_system=None)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=titles)
    for column in columns:
        table.add_column(
            Text(column.title),
            justify="right" if column.right else "left",
            min_width=max(column.width, len(column.title)),
            no_wrap=column is not columns[-1],
            overflow="fold",
        )
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    unbounded = terminal.options.update_width(_UNLIMITED)
    if Measurement.get(terminal, unbounded, table).minimum <= room:
        terminal.print(table)
    else:
        for row in rows:
            block = _block([column.title for column in columns[1:]], row[1:], room - 2)
            terminal.print(Text(printable(row[0])), Padding(block, (0, 0, 0, 2)))
    lines = output.getvalue().splitlines()
    return "\n".join(f"{' ' * indent}{line}".rstrip() for line in lines)


def _block(titles: Sequence[str], cells: Sequence[str], room: int) -> "Table":
    """The values of a row below each other, each beside its title; or behind it, where a word that
    fits into a line would be cut beside the titles.
    """
    from rich.table import Table
    from rich.text import Text

    values = [(title, printable(cell)) for title, cell in zip(titles, cells, strict=True) if cell]
    beside = room - max((len(title) for title, _ in values), default=0) - 2
    words = [len(word) for _, value in values for word in value.split() if len(word) <= room]
    block = Table.grid(padding=(0, 2, 0, 0))
    if beside >= max([_LEAST_BESIDE, *words]):
        block.add_column(no_wrap=True)
    block.add_column(overflow="fold")
    for title, value in values:
        if len(block.columns) == 2:
            block.add_row(Text(title), Text(value))
        else:
            block.add_row(Text(f"{title}: {value}"))
    return block
