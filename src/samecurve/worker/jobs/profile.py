"""A rank whose steps are watched: the run's own engine, feed and loop, in a warm process
(launch/pool.py). What `samecurve profile` does.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from samecurve.core.profile_types import ProfileSchedule, RankProfile
from samecurve.core.protocols import Batch, Engine, Rank
from samecurve.run.attempt import Attempt
from samecurve.run.directory import Run
from samecurve.system import cache_home
from samecurve.tasks import Tasks, open_task
from samecurve.worker.jobs.train import Unsaved
from samecurve.worker.join import join_warm, watch_of
from samecurve.worker.main import Requests, train_rank


class Watched:
    """An engine whose steps somebody watches.

    What a store or a reader would be given of its state is left out.
    """

    def __init__(self, engine: Engine, watch: Any) -> None:
        self._engine, self._watch = engine, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self, state: Any, batch: Batch, lr: float, asked: Sequence[int]) -> Any:
        return self._watch.step(state, batch, lr, asked)

    def sample(self, state: Any, step: int) -> list[str]:
        return []

    def gather(self, state: Any) -> list[Any]:
        return []

    def digests(self, state: Any) -> dict[str, str]:
        return {}


def watch_rank(
    index: int, group: Any, argument: str, course: ProfileSchedule, traced: bool
) -> RankProfile:
    """Train as a rank of `group`, watched, with as many devices as a run would have (spare ones
    would bring XLA threads). traced: the trace is left in the run's directory, too.
    """
    attempt = Attempt.from_json(argument)
    run = Run(Path(attempt.run))
    plan, config = run.read_plan(), run.read_config(Tasks())
    task = open_task(config, str(cache_home()))
    engine = join_warm(plan, index, group, more=False).make_engine(task, config.optimizer)
    watch = watch_of(
        engine, plan, course, run.home, run.home / f"trace-{index}.json.gz" if traced else None
    )
    watched: Any = Watched(engine, watch)
    train_rank(
        attempt,
        plan,
        config,
        Rank(index, index, plan.world_size),
        watched,
        task,
        Requests(None),
        Unsaved(),
    )
    found: RankProfile = watch.found()
    return found
