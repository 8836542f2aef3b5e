"""A run trained by the ranks of the tests' pool, as a launcher would have it trained."""

from pathlib import Path
from typing import Any

from samecurve.core.config.sections import Config
from samecurve.core.events import Activity, Event
from samecurve.core.planning.plan import Plan
from samecurve.observe import read_beat, read_events
from samecurve.run.directory import Run
from samecurve.run.directory.attempt import Attempt, Requests
from samecurve.tasks import open_task
from samecurve.worker.context import RankContext
from samecurve.worker.rank_main import train_rank
from worlds import Pool


def train_on_ranks(
    pool: Pool,
    home: Path,
    config: Config,
    plan: Plan,
    *,
    resume: int | None = None,
    stop_at: int | None = None,
    ask_in: Activity | None = None,
) -> list[Event]:
    """The run's journal.

    resume: from what was saved after this step.
    ask_in: when the last rank is asked to stop: in this phase, as it computes a loss.
    """
    run = Run(home)
    for directory in (run.home, run.checkpoints, run.logs):
        directory.mkdir(parents=True, exist_ok=True)
    run.write(config, plan)
    saved = str(run.checkpoints / f"step-{resume:08d}") if resume else None
    attempt = Attempt("test", str(home), saved, stop_at)
    pool.run(plan.layout.world_size, train_one_rank, attempt.to_json(), ask_in)
    return read_events(run.journal)


def train_one_rank(index: int, group: Any, attempt: str, ask_in: Activity | None = None) -> None:
    from samecurve.worker.join import join_warm

    context = RankContext.read_warm(attempt, index)
    task = open_task(context.config, "")
    requests, losses = Requests(None), task.losses

    def asked(*arguments: Any, **named: Any) -> Any:
        beat = read_beat(context.run.logs / f"heartbeat-{index}")
        if beat and beat.activity == ask_in:
            requests.stop()
        return losses(*arguments, **named)

    if ask_in and index == context.plan.layout.world_size - 1:
        task.losses = asked  # type: ignore[method-assign]
    engine = join_warm(context.plan, index, group).make_engine(task, context.config.optimizer)
    train_rank(context, engine, task, requests)
