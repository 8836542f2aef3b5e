"""Tables are aligned in pipes, and readable on narrow terminals."""

import sys
from collections.abc import Callable

import pytest

from samecurve.observe.text_table import Column, table_text

COLUMNS = [Column("layout", width=8), Column("loss", right=True, width=7), Column("verdict")]
ROWS = [["ddp:2", "1.7e-16", "PASS (1.8 s)"], ["fsdp:3", "2e-16", "FAIL " + "and why " * 30]]
Narrow = Callable[[int], None]


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> Narrow:
    """Make standard output a terminal of so many columns."""

    def make(columns: int) -> None:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("LINES", "50")

    return make


def test_a_pipe_gets_whole_lines_and_nothing_is_markup() -> None:
    head, first, second = table_text(COLUMNS, ROWS).splitlines()
    assert head == "  layout       loss  verdict"
    assert first == "  ddp:2     1.7e-16  PASS (1.8 s)"
    assert second.endswith("and why and why")
    assert "[red]x" in table_text(COLUMNS, [["[red]x", "", ""]])
    assert "\\x1b[31m" in table_text(COLUMNS, [["\x1b[31m", "", ""]])


def test_rows_that_are_shown_one_by_one_are_aligned_like_a_whole_table() -> None:
    alone = [table_text(COLUMNS, [])]
    alone += [table_text(COLUMNS, [row], titles=False) for row in ROWS]
    assert "\n".join(alone) == table_text(COLUMNS, ROWS)


def test_a_narrow_terminal_folds_the_last_column(narrow: Narrow) -> None:
    narrow(40)
    lines = table_text(COLUMNS, ROWS).splitlines()
    assert lines[:2] == ["  layout       loss  verdict", "  ddp:2     1.7e-16  PASS (1.8 s)"]
    assert max(map(len, lines)) <= 40
    assert lines[3].startswith(" " * 21)


def test_rows_become_blocks_where_columns_do_not_fit(narrow: Narrow) -> None:
    narrow(20)
    assert table_text(COLUMNS, []) == ""
    assert table_text(COLUMNS, ROWS[:1]).splitlines() == [
        "  ddp:2",
        "    loss     1.7e-16",
        "    verdict  PASS",
        "             (1.8 s)",
    ]
