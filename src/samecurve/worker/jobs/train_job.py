"""The job of `samecurve verify` and --probe-batch: a rank in a warm process trains.

The process will train more after this (launch/pool.py).
"""

from collections.abc import Sequence
from typing import Any

from samecurve.core.system.cache import cache_home
from samecurve.run.directory.attempt import Requests
from samecurve.tasks import open_task
from samecurve.worker.context import RankContext
from samecurve.worker.join import join_warm
from samecurve.worker.rank_main import train_rank


class Unsaved:
    """The store of a run that saves nothing."""

    def save(self, step: int, pieces: Sequence[Any], loop: Any, *, began: float) -> None: ...
    def load(self, step: int) -> None: ...
    def check(self) -> bool:
        return False

    def close(self) -> None: ...
    def abandon(self) -> None: ...


def try_out(index: int, group: Any, attempt: str) -> None:
    """Train as a rank of `group` and save nothing. --probe-batch sees so which batch fits."""
    rehearse(index, group, attempt, keep=False)


def rehearse(index: int, group: Any, attempt: str, *, keep: bool = True) -> None:
    """Train as a rank of `group`. attempt: as JSON. keep: save checkpoints."""
    context = RankContext.read_warm(attempt, index)
    plan, config = context.plan, context.config
    task = open_task(config, str(cache_home()))
    engine = join_warm(plan, index, group).make_engine(task, config.optimizer)
    train_rank(
        context,
        engine,
        task,
        Requests(None),
        store=None if keep else Unsaved(),
        as_if_split=keep,
    )
