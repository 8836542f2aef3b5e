"""Runs of losses as strangers write them (strangers/), each from a copy of its file: what it keeps
in its file's variables begins anew.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rank_runs import train_on_ranks
from samecurve.core.planning.planner import plan
from samecurve.errors import UserError
from samecurve.launch.pool import JobFailedError
from samecurve.observe import read_events
from samecurve.run.directory import Run
from samecurve.tasks import open_task
from tiny import MACHINE, config_of
from worlds import Pool

FILES = Path(__file__).parent / "strangers"
STEPS, BATCH, LR = 12, 8, 0.1  # more than two epochs, of which the last step is short
LAYOUTS = {  # strategy, devices, accumulation steps
    "one": ("single", 1, 1),
    "parts": ("single", 1, 4),
    "ddp": ("ddp", 2, 1),
    "fsdp": ("fsdp", 2, 1),
}

PLAIN: dict[str, dict[str, Any]] = {  # a rate that stays, without clipping
    "optimizer": {"lr": LR, "clip": 0.0},
    "schedule": {"warmup": 0, "decay": "constant"},
}
SGD = {**PLAIN["optimizer"], "name": "sgd", "momentum": 0.0, "weight_decay": 0.0}


class Outcome(NamedTuple):
    """What became of a run.

    losses: by step, of the evaluations too
    error: why it ended; "": it did not
    where: the place that the error names
    warned: the lines of warnings
    """

    losses: dict[str, float]
    error: str
    where: str
    warned: list[str]


def run(
    pool: Pool,
    home: Path,
    case: str,
    layout: str,
    *,
    exact: bool = False,
    sections: Mapping[str, Mapping[str, Any]] | None = None,
    resume: int | None = None,
    stop_at: int | None = None,
) -> Outcome:
    """Train a case on ranks of the pool.

    case: file.Class; home: where the runs lie
    sections: of the config, in place of its own
    """
    name, _, class_name = case.partition(".")
    home /= f"{class_name}-{layout}{'-exact' * exact}"
    code = home / "code"
    if not code.exists():
        shutil.copytree(FILES, code, ignore=shutil.ignore_patterns("__pycache__"))
    strategy, world, parts = LAYOUTS[layout]
    batch: dict[str, Any] = {"samples": BATCH, "accumulate": parts}
    config = config_of(
        {
            "task": f"{code / name}.py:{class_name}",
            "batch": {"samples": BATCH, "per_device": 4} if exact else batch,
            "optimizer": {"lr": LR},
            "train": {
                **{"steps": STEPS, "precision": "f64", "eval_every": 6, "save_every": 6},
                "exact": exact,
            },
            "devices": {"use": f"cpu:{world}", "strategy": strategy},
            **(sections or {}),
        }
    )
    error = where = ""
    try:
        made = plan(config, MACHINE, open_task(config, "").facts())
        train_on_ranks(pool, home, config, made, resume=resume, stop_at=stop_at)
    except JobFailedError as failed:
        error, where = str(failed.refusal or failed), failed.refusal.where if failed.refusal else ""
    except UserError as refusal:
        error, where = str(refusal), refusal.where
    return _outcome(Run(home).journal, error, where)


def _outcome(journal: Path, error: str, where: str) -> Outcome:
    losses, warned = {}, []
    for event in read_events(journal) if journal.exists() else ():
        if event.kind in {"step", "evaluated"}:
            losses[f"{event.kind} {event.step}"] = event.values["loss"]
        elif event.kind == "warned":
            warned.append(event.values["text"])
    return Outcome(losses, error, where, warned)
