"""The console's last lines name units and estimates only where they are known."""

from pathlib import Path

import pytest

from samecurve.core.events import Event
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.planner import plan
from samecurve.observe.event_lines import console_lines
from tiny import MACHINE, config_of, tiny_values


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
    facts = Facts(
        samples=100,
        eval_samples=10,
        tokens_per_sample=1,
        params=4,
        trainable=4,
        blocks=0,
        bytes_per_sample=None,
        flops_per_sample=None,
        coupled=(),
        fingerprint="",
        reference=reference,
    )
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
