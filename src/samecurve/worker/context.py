"""The rank that this process is: its attempt, run, plan and config; and the files that it writes
beside the journal: checkpoints, with all that a resume must know, and copies of the files that
using the model needs.
"""

import shutil
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import samecurve
from samecurve.checkpoint.store import Published, Publisher, Store
from samecurve.core.config import flatten
from samecurve.core.config.sections import Config
from samecurve.core.events import Event
from samecurve.core.planning.plan import Plan
from samecurve.core.protocols import Rank, Record, Task
from samecurve.observe import Journal
from samecurve.run.directory import Run
from samecurve.run.directory.attempt import Attempt, Requests
from samecurve.tasks import Tasks
from samecurve.worker import is_first


@dataclass(frozen=True)
class RankContext:
    """A rank of an attempt."""

    attempt: Attempt
    run: Run
    plan: Plan
    config: Config
    rank: Rank

    @classmethod
    def read(cls, attempt: Attempt, rank: Rank) -> "RankContext":
        """Read the context from the files of the attempt's run."""
        run = Run(Path(attempt.run))
        return cls(attempt, run, run.read_plan(), run.read_config(Tasks()), rank)

    @classmethod
    def read_warm(cls, attempt: str, index: int) -> "RankContext":
        """Read the context of a rank in a warm process (launch/pool.py). attempt: as JSON."""
        run = Run(Path(Attempt.from_json(attempt).run))
        rank = Rank(index, index, run.read_plan().layout.world_size)
        return cls.read(Attempt.from_json(attempt), rank)

    @property
    def is_first(self) -> bool:
        """Whether this rank keeps the journal, publishes checkpoints and reads requests."""
        return is_first(self.rank)


def checkpoint_store(
    context: RankContext, record: Record, journal: Journal | None, requests: Requests
) -> Store:
    """The store into which this rank writes the run's checkpoints.

    journal: synced before a checkpoint is published; None: another rank publishes.
    requests: told of each save, since the next one may go by the clock
    """
    plan, config_values = context.plan, flatten(context.config)

    def meta(step: int) -> dict[str, object]:
        assert journal
        position = plan.order.position(step)
        return {
            "step": step,
            "epoch": position.epoch,
            "consumed": position.first,
            "config": config_values,
            "fixed": plan.to_json()["fixed"],
            "versions": versions(plan.layout.engine),
            "journal": journal.head().to_json(),
        }

    def published(save: Published) -> None:
        values = {
            "path": save.path,
            "bytes": save.bytes,
            "seconds": save.seconds,
            "blocked_seconds": save.blocked,
            "manifest": save.manifest_hash,
        }
        requests.saved(save.blocked)
        record(Event("saved", save.step, values))

    publisher = None
    if journal:
        publisher = Publisher(
            keep=plan.keep,
            best=plan.best,
            meta=meta,
            before=journal.sync,
            published=published,
        )
    return Store(
        context.run.checkpoints, context.rank, attempt=context.attempt.name, publisher=publisher
    )


def versions(engine: str) -> dict[str, str]:
    return {
        "samecurve": samecurve.__version__,
        engine: version(engine),
        "python": sys.version.split()[0],
    }


def keep_assets(run: Run, task: Task) -> None:
    """Copy the files that using the model needs beside its weights, such as a tokenizer."""
    for name, source in task.assets().items():
        run.assets.mkdir(exist_ok=True)
        shutil.copyfile(source, run.assets / name)
