"""The rank that this process is: its attempt, run, plan and config."""

from dataclasses import dataclass
from pathlib import Path

from samecurve.core.config.sections import Config
from samecurve.core.planning.plan import Plan
from samecurve.core.protocols import Rank
from samecurve.run.directory.attempt import Attempt
from samecurve.run.directory.run_directory import Run
from samecurve.tasks import Tasks
from samecurve.worker.cluster_env import is_first


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
