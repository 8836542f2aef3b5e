"""Training in ranks that are warm already and will do more than this (launch/pool.py): what `verify` and --probe-batch do."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.core.protocols import Rank
from lockstep.launch.describe import cache_home
from lockstep.launch.files import Attempt, Run
from lockstep.launch.worker import Requests, devices_of, train_rank
from lockstep.tasks import Tasks, open_task


class Unsaved:
    """The store of a run that is thrown away."""

    def save(self, step: int, pieces: Sequence[Any], loop: Any) -> None: ...
    def check(self) -> None: ...
    def close(self) -> None: ...
    def abandon(self) -> None: ...


def try_out(index: int, group: Any, argument: str) -> None:
    """Train as a rank of `group` and save nothing: how --probe-batch sees what fits."""
    rehearse(index, group, argument, for_good=True, keep=False)


def rehearse(index: int, group: Any, argument: str, for_good: bool = False, keep: bool = True) -> None:
    """Train as a rank of `group`, whose processes are warm and will do more than this: what `lockstep verify` does. Random masks are off, unless for_good."""
    import torch

    from lockstep.on_torch.collectives import Ranks
    from lockstep.on_torch.dropout import switch_off

    attempt = Attempt.from_json(argument)
    run = Run(Path(attempt.run))
    plan, config = run.read_plan(), run.read_config(Tasks())
    torch.set_num_threads(plan.threads)
    devices = devices_of(plan, index)
    task = open_task(config, str(cache_home()))
    made = task.model

    def model() -> Any:
        quiet = made()
        if not for_good:
            switch_off(quiet)
        return quiet

    task.model = model  # type: ignore[method-assign]
    ranks = Ranks(group) if plan.backend != "none" else Ranks()
    train_rank(attempt, plan, config, Rank(index, index, plan.processes), ranks, devices, task, Requests(None), None if keep else Unsaved())
