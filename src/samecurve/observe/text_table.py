"""Tables of text: aligned columns for a terminal, a pipe or a log.

A terminal that is too narrow folds the last column. If that is not enough, each row becomes a block
with one `title  value` line for each column. Pipes and logs get whole lines of any length.
"""

import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from samecurve.terminal import printable

_UNLIMITED = 1 << 16  # characters of a line that goes to a pipe or a file
_LEAST = 6  # characters for a value beside its title; where there are fewer, it follows the title


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

    room = _UNLIMITED
    if sys.stdout.isatty():
        room = Console().width - indent
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
        beside = room - max(len(column.title) for column in columns) - 4  # for a value
        for first, *others in rows:
            block = Table.grid(padding=(0, 2, 0, 0))
            if beside >= _LEAST:
                block.add_column(no_wrap=True)
            block.add_column(overflow="fold")
            for column, cell in zip(columns[1:], others, strict=True):
                value = Text(printable(cell))
                if cell and beside >= _LEAST:
                    block.add_row(Text(column.title), value)
                elif cell:
                    block.add_row(Text(f"{column.title}: ").append(value))
            terminal.print(Text(printable(first)), Padding(block, (0, 0, 0, 2)))
    lines = output.getvalue().splitlines()
    return "\n".join(f"{' ' * indent}{line}".rstrip() for line in lines)
