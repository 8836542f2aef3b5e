"""Training in ranks that are warm already and will do more than this (launch/pool.py): what
`verify` and --probe-batch do.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from samecurve.core.protocols import Rank
from samecurve.run.attempt import Attempt
from samecurve.run.directory import Run
from samecurve.system import cache_home
from samecurve.tasks import Tasks, open_task
from samecurve.worker.join import join_warm
from samecurve.worker.main import Requests, train_rank


class Unsaved:
    """The store of a run that is thrown away."""

    def save(self, step: int, pieces: Sequence[Any], loop: Any) -> None: ...
    def check(self) -> None: ...
    def close(self) -> None: ...
    def abandon(self) -> None: ...


def try_out(index: int, group: Any, argument: str) -> None:
    """Train as a rank of `group` and save nothing: how --probe-batch sees what fits."""
    rehearse(index, group, argument, for_good=True, keep=False)


def rehearse(
    index: int, group: Any, argument: str, for_good: bool = False, keep: bool = True
) -> None:
    """Train as a rank of `group`, whose processes are warm and will do more than this: what
    `samecurve verify` does. Random masks are off, unless for_good or exact, where they follow the
    sample.
    """
    attempt = Attempt.from_json(argument)
    run = Run(Path(attempt.run))
    plan, config = run.read_plan(), run.read_config(Tasks())
    task = open_task(config, str(cache_home()))
    if plan.engine == "torch" and not for_good and not plan.exact:
        _quieten(task)
    engine = join_warm(plan, index, group).make_engine(task, config.optimizer)
    train_rank(
        attempt,
        plan,
        config,
        Rank(index, index, plan.world_size),
        engine,
        task,
        Requests(None),
        None if keep else Unsaved(),
    )


def _quieten(task: Any) -> None:
    from samecurve.torch_engine.layers.dropout import disable_dropout

    made = task.model

    def model() -> Any:
        quiet = made()
        disable_dropout(quiet)
        return quiet

    task.model = model
