"""Warm ranks outlive a job that fails in all of them."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from worlds import JobFailedError, Pool


def sum_of_ranks(rank: int, group: Any) -> tuple[float, int]:
    """And the process id."""
    total = torch.ones(1) * rank
    dist.all_reduce(total, group=group)
    return total.item(), os.getpid()


def fail_at_different_points(rank: int, group: Any) -> None:
    """The last rank before a collective that the others have begun."""
    if rank < dist.get_world_size(group) - 1:
        dist.all_reduce(torch.ones(1), group=group, async_op=True)
    raise ValueError(f"a planted fault of rank {rank}")


def test_ranks_that_all_fail_serve_the_next_job(pool: Pool) -> None:
    before = pool.run(3, sum_of_ranks)
    with pytest.raises(JobFailedError, match=r"rank \d of 3: ValueError: a planted fault of rank"):
        pool.run(3, fail_at_different_points)
    assert pool.run(3, sum_of_ranks) == before
    assert [total for total, _ in before] == [3.0] * 3
