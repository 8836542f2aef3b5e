"""A run as its launcher leaves it when it is killed, for the trackers that read its journal."""

from pathlib import Path

import numpy as np
from PIL import Image

from samecurve.core.config.document import dump_document
from samecurve.core.events import Event
from samecurve.core.planning.planner import plan
from samecurve.observe import append_event
from tiny import MACHINE, config_of, ragged_task, tiny_values

LOSSES = np.random.default_rng(0).normal(3, 1, 100)


def write(run: Path, *events: Event) -> None:
    for event in events:
        append_event(run / "journal.jsonl", event)


def steps(first: int, last: int, shift: float = 0.0) -> list[Event]:
    return [
        Event(
            "step",
            step,
            {
                "loss": LOSSES[step] + shift,
                "lr": 1e-3 / step,
                "memory_bytes": 359366656,
                "skipped": True,
                "grad_norm": None,
            },
        )
        for step in range(first, last + 1)
    ]


def killed_run(home: Path, corpus: Path, cache: Path) -> Path:
    """A run that was killed at step 12, its last checkpoint at 8."""
    (home / "logs").mkdir(parents=True)
    values = tiny_values(corpus)
    (home / "config.yaml").write_text(dump_document(values))
    config = config_of(values)
    resolved = plan(config, MACHINE, ragged_task(config, cache).facts())
    Image.new("RGB", (5, 3), "red").save(home / "logs/red.png")
    (home / "logs/torn.png").write_bytes(b"\x89PNG")
    write(
        home,
        Event("planned", 0, {"attempt": "1a-2", "plan": resolved.to_json()}),
        Event("started", 0),
        *steps(1, 8),
        Event("saved", 8, {"path": "p"}),
    )
    write(
        home,
        Event("sensors", 9, {"utilisation_by_device": [0.5, None], "host_utilisation": 0.25}),
        Event("sensors", 9, {"utilisation_by_device": [0.6, 0.7]}),
        *steps(9, 10),
    )
    write(
        home,
        Event("evaluated", 10, {"loss": 2.5, "perplexity": 12.18, "best_step": 10}),
        Event("warned", 10, {"text": "one"}),
        Event("warned", 10, {"text": "two"}),
    )
    write(
        home,
        Event(
            "sampled",
            10,
            {
                "texts": ["the *square*"],
                "pictures": ["logs/red.png", "logs/torn.png", "../../secret.png"],
            },
        ),
        *steps(11, 12),
    )
    return home


def resume(run: Path) -> None:
    """From 8 on, with other numbers, to step 13."""
    write(
        run,
        Event("planned", 8, {"attempt": "1b-3", "plan": {}}),
        Event("resumed", 8, {"attempt": "1b-3", "text": "from p"}),
        *steps(9, 13, 0.5),
        Event("finished", 13, {}),
    )
