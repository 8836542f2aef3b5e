"""The console's last lines name units and estimates only where they are known."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from samecurve.core.events import Event
from samecurve.core.planning.planner import plan
from samecurve.observe.console import RichView
from samecurve.observe.event_lines import console_lines
from tiny import FACTS, MACHINE, config_of, step_event, tiny_values


@pytest.mark.parametrize(
    ("reference", "loss"),
    [
        ({}, "validation loss 2.3567  runs/a"),
        (
            {"unigram_entropy": 3.2},
            "validation loss 2.3567 nats (single-token entropy of the corpus 3.2000)  runs/a",
        ),
    ],
)
def test_the_last_lines_say_what_is_known(
    reference: dict[str, float], loss: str, tmp_path: Path
) -> None:
    facts = FACTS.having(reference=reference)
    planned = plan(config_of(tiny_values(tmp_path)), MACHINE, facts)
    values = {
        "loss": 2.3567,
        "seconds": 2.0,
        "steps": 8,
        "goodput": 1.0,
        "skipped": 0,
        "memory_bytes_by_device": [1 << 20],
        "memory_estimate_bytes": planned.memory_estimate,
    }
    done, memory = console_lines(Event("finished", 8, values), planned, Path("runs/a"))
    assert done.endswith(loss)
    assert memory == "memory 1.0 MiB a device at most; the plan had no estimate of activations"


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (
            {"import_seconds": 37.5, "load": 20.06, "cores": 2},
            "slow   the start took 37.5 s (import 37.5 s); load average 20.1 on 2 cores, more than"
            " they can run at once",
        ),
        (
            {"import_seconds": 37.5, "load": 0.4, "cores": 2},
            "slow   the start took 37.5 s (import 37.5 s); load average 0.4 on 2 cores",
        ),
        ({"import_seconds": 37.5}, "slow   the start took 37.5 s (import 37.5 s)"),
        ({"import_seconds": 7.5, "load": 20.06, "cores": 2}, None),
    ],
)
def test_a_slow_start_says_what_is_known(
    values: dict[str, float], line: str | None, tmp_path: Path
) -> None:
    accepted = plan(config_of(tiny_values(tmp_path)), MACHINE, FACTS)
    lines = console_lines(Event("started", 0, values), accepted, Path("runs/a"))
    assert lines == ([line] if line else [])


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (100, "step   1201/2000  loss 2.3456  grad 1.000"),
        (40, "step   1201/2000  loss 2.3456"),
        (20, "1201/2000 2.3456"),
        (16, "2.3456"),
        (7, "2.3456"),
        (4, ""),
    ],
)
def test_the_bar_keeps_step_and_loss(width: int, line: str, tmp_path: Path) -> None:
    """The bar is beside them, in one line of the terminal."""
    planned = plan(config_of(tiny_values(tmp_path, train={"steps": 2000})), MACHINE, FACTS)
    screen = io.StringIO()
    terminal = Console(
        file=screen, width=width, force_terminal=True, color_system=None, soft_wrap=True
    )
    view = RichView(planned, Path("runs/a"), terminal)
    view.show(step_event(1201, 2.3456))
    view.close()
    rows = [row for row in re.split(r"\r|\n|\x1b\[[0-9;?]*[A-Za-z]", screen.getvalue()) if row]
    assert any(row.startswith(line) for row in rows), rows
    assert max(map(len, rows)) <= width
    assert width in {7, 4} or "\N{BOX DRAWINGS HEAVY HORIZONTAL}" in rows[-1]


def test_the_line_below_the_bar_ends_with_a_whole_word(tmp_path: Path) -> None:
    screen = io.StringIO()
    terminal = Console(file=screen, width=20, force_terminal=True, color_system=None)
    view = RichView(plan(config_of(tiny_values(tmp_path)), MACHINE, FACTS), tmp_path, terminal)
    view.show(Event("sensors", 14, {"memory_bytes_by_device": [1 << 20]}))
    view.close()
    assert "load   step 14 …" in re.split(r"\r|\n|\x1b\[[0-9;?]*[A-Za-z]", screen.getvalue())
