"""The job of `samecurve profile`: a rank in a warm process trains, and its steps are watched.

The engine, the feed and the loop are those of a run.
"""

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from samecurve.core.measurement.profile_types import ProfileSchedule, RankProfile
from samecurve.core.protocols import Batch, Engine
from samecurve.core.system.cache import cache_home
from samecurve.run.directory.attempt import Requests
from samecurve.tasks import open_task
from samecurve.worker.context import RankContext
from samecurve.worker.jobs.train_job import Unsaved
from samecurve.worker.join import join_warm, watch_of
from samecurve.worker.rank_main import train_rank


class Watched:
    """An engine whose steps are watched. Nothing of its state is gathered, sampled or hashed."""

    def __init__(self, engine: Engine, watch: Any) -> None:
        self._engine, self._watch = engine, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self, state: Any, batch: Batch, lr: float, requests: Sequence[int]) -> Any:
        return self._watch.step(state, batch, lr, requests)

    def sample(self, _state: Any, _step: int) -> list[str]:
        return []

    def kept(self) -> dict[str, Any]:
        return {}

    def gather(self, _state: Any) -> list[Any]:
        return []

    def digests(self, _state: Any) -> dict[str, str]:
        return {}


def watch_rank(
    index: int, group: Any, attempt: str, schedule: ProfileSchedule, trace_home: str | None
) -> RankProfile:
    """Train as a rank of `group`, and watch its steps.

    The rank has as many devices as in a run, since spare devices would bring threads of XLA.

    attempt: as JSON. trace_home: where the profiler's trace is left; None: no trace.
    """
    try:
        return _watch(index, group, attempt, schedule, trace_home)
    finally:
        gc.collect()  # models lie in circles of references, and the next job wants their memory


def _watch(
    index: int, group: Any, attempt: str, schedule: ProfileSchedule, trace_home: str | None
) -> RankProfile:
    context = RankContext.read_warm(attempt, index)
    plan, config, home = context.plan, context.config, context.run.home
    task = open_task(config, str(cache_home()))
    engine = join_warm(plan, index, group, more=False).make_engine(task, config.optimizer)
    trace = Path(trace_home) / f"trace-{index}.json.gz" if trace_home else None
    watch = watch_of(engine, plan, schedule, home, trace)
    watched: Any = Watched(engine, watch)
    train_rank(context, watched, task, Requests(None), store=Unsaved())
    profile: RankProfile = watch.rank_profile()
    return profile
