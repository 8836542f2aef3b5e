"""What a rank writes beside the journal: checkpoints with what a resume must know, and copies of what the model's use needs."""

import shutil
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import lockstep
from lockstep.checkpoint.store import Published, Store
from lockstep.core.config import Config, flatten
from lockstep.core.events import Event
from lockstep.core.plan import Plan
from lockstep.core.protocols import Rank
from lockstep.launch.files import Attempt, Run
from lockstep.observe.journal import Journal


def checkpoint_store(run: Run, plan: Plan, config: Config, rank: Rank, attempt: Attempt, first: bool, record: Callable[[Event], None], journal: Journal | None) -> Store:
    values = flatten(config)

    def meta(step: int) -> dict[str, Any]:
        position = plan.order.position(step)
        return {"step": step, "epoch": position.epoch, "consumed": position.first, "config": values, "fixed": plan.to_json()["fixed"], "versions": versions(plan.engine)}

    def published(save: Published) -> None:
        record(Event("saved", save.step, {"path": save.path, "bytes": save.bytes, "seconds": save.seconds, "blocked_seconds": save.blocked}))

    return Store(run.checkpoints, rank.index, rank.world, plan.keep, attempt.name, first, meta, published, journal.sync if journal else lambda: None)


def versions(engine: str) -> dict[str, str]:
    return {"lockstep": lockstep.__version__, engine: version(engine), "python": sys.version.split()[0]}


def keep_assets(run: Run, task: Any) -> None:
    """Copies of what the model's use needs beside its weights (a tokenizer)."""
    for name, source in task.assets().items():
        run.assets.mkdir(exist_ok=True)
        shutil.copyfile(source, run.assets / name)
