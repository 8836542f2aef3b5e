"""What a rank writes beside the journal: checkpoints with what a resume must know, and copies of
what the model's use needs.
"""

import shutil
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import samecurve
from samecurve.checkpoint.store import Published, Store
from samecurve.core.config.sections import Config, flatten
from samecurve.core.events import Event
from samecurve.core.planning.plan import Plan
from samecurve.core.protocols import Rank
from samecurve.observe.journal import Journal
from samecurve.run.attempt import Attempt
from samecurve.run.directory import Run


def checkpoint_store(
    run: Run,
    plan: Plan,
    config: Config,
    rank: Rank,
    attempt: Attempt,
    first: bool,
    record: Callable[[Event], None],
    journal: Journal | None,
) -> Store:
    values = flatten(config)

    def meta(step: int) -> dict[str, Any]:
        position = plan.order.position(step)
        return {
            "step": step,
            "epoch": position.epoch,
            "consumed": position.first,
            "config": values,
            "fixed": plan.to_json()["fixed"],
            "versions": versions(plan.engine),
        }

    def published(save: Published) -> None:
        record(
            Event(
                "saved",
                save.step,
                {
                    "path": save.path,
                    "bytes": save.bytes,
                    "seconds": save.seconds,
                    "blocked_seconds": save.blocked,
                },
            )
        )

    return Store(
        run.checkpoints,
        rank.index,
        rank.world_size,
        plan.keep,
        attempt.name,
        first,
        meta,
        published,
        journal.sync if journal else lambda: None,
    )


def versions(engine: str) -> dict[str, str]:
    return {
        "samecurve": samecurve.__version__,
        engine: version(engine),
        "python": sys.version.split()[0],
    }


def keep_assets(run: Run, task: Any) -> None:
    """Copies of what the model's use needs beside its weights (a tokenizer)."""
    for name, source in task.assets().items():
        run.assets.mkdir(exist_ok=True)
        shutil.copyfile(source, run.assets / name)
