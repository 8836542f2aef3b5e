"""Tables are aligned in pipes, and readable on narrow terminals."""

from collections.abc import Callable

import pytest

from samecurve.observe import text_table
from samecurve.observe.plan_table import table_of_keys
from samecurve.observe.text_table import Column, table_text

COLUMNS = [Column("layout", width=8), Column("loss", right=True, width=7), Column("verdict")]
ROWS = [["ddp:2", "1.7e-16", "PASS (1.8 s)"], ["fsdp:3", "2e-16", "FAIL " + "and why " * 30]]
Narrow = Callable[[int], None]


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> Narrow:
    """Make standard output a terminal of so many columns."""

    def make(columns: int) -> None:
        monkeypatch.setattr(text_table, "width_of", lambda _stream: columns)

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


def test_a_word_that_fits_into_a_line_of_a_block_is_whole(narrow: Narrow) -> None:
    columns = [Column("key"), Column("from"), Column("value")]
    rows = [["lr", "a/file/of/some.yaml:4", "0.1"], ["seed", "default", "0"]]
    narrow(26)
    assert table_text(columns, rows).splitlines() == [
        "  lr",
        "    from:",
        "    a/file/of/some.yaml:4",
        "    value: 0.1",
        "  seed",
        "    from   default",
        "    value  0",
    ]


@pytest.mark.parametrize("columns", [1, 2, 5])
def test_no_terminal_is_too_narrow_for_a_table(columns: int, narrow: Narrow) -> None:
    narrow(columns)
    assert table_text(COLUMNS, ROWS[:1]).split()[:2] == ["ddp:2", "loss:"]


def test_one_long_config_value_makes_no_other_row_wide() -> None:
    long = [f"source-{number}" for number in range(20)]
    values = {"train.seed": 0, "data.source": long, "optimizer.lr": 0.1}
    text = table_of_keys(values, {"optimizer.lr": "--lr"})
    assert text.splitlines() == [
        "  config key    from     value",
        "  train.seed    default  0",
        f"  data.source   default  [{', '.join(long)}]",
        "  optimizer.lr  --lr     0.1",
    ]
