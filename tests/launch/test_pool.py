"""Warm ranks outlive a job that fails in all of them; what a rank meets is told with its cause."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from samecurve.launch.pool import pool as warm_pool
from worlds import JobFailedError, Pool


def sum_of_ranks(rank: int, group: Any) -> tuple[float, int]:
    """And the process id."""
    total = torch.ones(1) * rank
    dist.all_reduce(total, group=group)
    return total.item(), os.getpid()


def fail_at_different_points(rank: int, group: Any) -> None:
    """The last rank before a collective that the others have begun. A circle holds its group."""
    if rank < dist.get_world_size(group) - 1:
        dist.all_reduce(torch.ones(1), group=group, async_op=True)
    else:
        circle = [group]
        circle.append(circle)
    raise ValueError(f"a planted fault of rank {rank}")


def test_ranks_that_all_fail_serve_the_next_job(pool: Pool) -> None:
    before = pool.run(3, sum_of_ranks)
    with pytest.raises(JobFailedError, match=r"rank \d of 3: ValueError: a planted fault of rank"):
        pool.run(3, fail_at_different_points)
    assert pool.run(3, sum_of_ranks) == before
    assert [total for total, _ in before] == [3.0] * 3


@pytest.fixture
def own() -> Iterator[Pool]:
    """Ranks of the test's own, which it may spoil."""
    with warm_pool(3) as ranks:
        yield ranks


def spoil_new_groups(rank: int, group: Any, whose: int) -> None:
    """From now on, a rank can make no group: it has run out of files, say."""
    del group

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(24, "Too many open files")

    if rank == whose:
        dist.new_group = fail


def end_at_new_groups(rank: int, group: Any, whose: int) -> None:
    """From now on, a rank ends where it is to make a group, as the kernel ends it."""
    del group
    if rank == whose:
        dist.new_group = lambda *_, **__: os._exit(9)


def test_a_group_that_no_rank_can_make(pool: Pool) -> None:
    with pytest.raises(JobFailedError, match=r"rank \d of 2 .* no group .*nonesuch") as raised:
        pool.run(2, sum_of_ranks, backend="nonesuch")
    assert "samecurve check" in raised.value.remedy
    assert [total for total, _ in pool.run(2, sum_of_ranks)] == [1.0] * 2


def test_a_group_that_one_rank_can_not_make(own: Pool) -> None:
    own.run(3, spoil_new_groups, 1)
    with pytest.raises(JobFailedError, match=r"rank 1 of 2 .*Too many open files") as raised:
        own.run(2, sum_of_ranks)
    assert "ulimit -n" in raised.value.remedy
    assert "in fail" in raised.value.trace
    assert [total for total, _ in own.run(3, sum_of_ranks)] == [3.0] * 3  # fresh ranks


def test_a_rank_that_is_no_member_says_so_once_it_is_wanted(own: Pool) -> None:
    """All ranks make a group together; a fault of the third concerns the first two not."""
    own.run(3, spoil_new_groups, 2)
    assert [total for total, _ in own.run(2, sum_of_ranks)] == [1.0] * 2
    with pytest.raises(JobFailedError, match=r"rank 2 of 3 .*Too many open files"):
        own.run(3, sum_of_ranks)


def test_a_rank_that_ends_while_it_makes_a_group(own: Pool) -> None:
    own.run(3, end_at_new_groups, 1)
    with pytest.raises(JobFailedError, match="rank 1 of 2 ended") as raised:
        own.run(2, sum_of_ranks)
    assert raised.value.ended
