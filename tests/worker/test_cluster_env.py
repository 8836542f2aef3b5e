"""A rank's place, as whoever started it says in the environment."""

import pytest

from samecurve.errors import UserError
from samecurve.worker import first_host, from_slurm, rank_from
from slurm import slurm_variables


def test_whoever_started_a_rank_says_who_it_is() -> None:
    assert [
        first_host(nodes)
        for nodes in ("n1", "n1,n2", "gpu[07-09,12],cpu1", "a[3,5]-ib", "n[1-2],m")
    ] == ["n1", "n1", "gpu07", "a3-ib", "n1"]
    rank = rank_from(
        from_slurm({**slurm_variables(5, 123), "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1"})
    )
    assert (rank.index, rank.local, rank.world_size, rank.hosts) == (5, 1, 8, 2)
    with pytest.raises(UserError, match="3 tasks on 2 nodes"):
        from_slurm({**slurm_variables(0, 1), "SLURM_STEP_NUM_TASKS": "3"})
