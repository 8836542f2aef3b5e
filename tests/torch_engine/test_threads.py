import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import psutil
import pytest
import torch

from samecurve.torch_engine.strategies.threads import ThreadTeam


@pytest.fixture
def team() -> Iterator[ThreadTeam]:
    made = ThreadTeam(3)
    yield made
    made.close()


def test_job_k_runs_on_thread_k_and_all_run_at_once(team: ThreadTeam) -> None:
    """They meet at a barrier, so none waits for another to end."""
    met = threading.Barrier(3, timeout=20)

    def job(index: int) -> tuple[int, int]:
        met.wait()
        return index, threading.get_ident()

    first, second = (team.run([partial(job, index) for index in range(3)]) for _ in range(2))
    assert first == second
    assert [index for index, _ in first] == [0, 1, 2]
    assert len({thread for _, thread in first}) == 3


def test_jobs_have_the_settings_of_the_thread_that_runs_them(team: ThreadTeam) -> None:
    """Those of torch's compiler are context variables, whose defaults a new thread would have."""
    setting = ContextVar("setting", default=8)
    for value in (16, 32):
        setting.set(value)
        assert team.run([setting.get] * 3) == [value] * 3


def test_total_is_added_in_thread_order_and_the_same_for_all(team: ThreadTeam) -> None:
    """Bit for bit, also where peers arrive in another order, and where one changes its values right
    afterwards.
    """
    values = [
        torch.randn(50, generator=torch.Generator().manual_seed(index)) * 10.0**index
        for index in range(3)
    ]
    expected = values[0] + values[1] + values[2]

    def job(index: int) -> list[torch.Tensor]:
        totals = []
        for turn in range(30):
            if turn < 3:
                time.sleep(0.002 * ((index + turn) % 3))
            own = values[index].clone()
            totals.append(team.peers[index].all_reduced(own))
            own.fill_(torch.nan)
        return totals

    for totals in team.run([partial(job, index) for index in range(3)]):
        assert all(torch.equal(total, expected) for total in totals)


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, peer: Any) -> torch.Tensor:
        ctx.peer = peer
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.peer.all_reduced(gradient), None


def backward(team: ThreadTeam, index: int) -> torch.Tensor:
    values = torch.ones(2, requires_grad=True)
    _Total.apply(values, team.peers[index]).sum().mul(index + 1.0).backward()  # type: ignore[no-untyped-call]
    assert values.grad is not None
    return values.grad


def fails(error: Exception) -> Callable[[], Any]:
    def job() -> None:
        raise error

    return job


def test_total_in_backward(team: ThreadTeam) -> None:
    assert all(
        gradient.tolist() == [6.0, 6.0]
        for gradient in team.run([partial(backward, team, index) for index in range(3)])
    )


def test_a_failure_wakes_those_who_wait_and_is_what_is_raised(team: ThreadTeam) -> None:
    """One waits in a forward pass, one in backward; the team goes on to work afterwards."""
    for _ in range(3):
        with pytest.raises(ZeroDivisionError, match="mine"):
            team.run(
                [
                    lambda: team.peers[0].all_reduced(torch.ones(1)),
                    lambda: backward(team, 1),
                    fails(ZeroDivisionError("mine")),
                ]
            )
        assert [
            total.item()
            for total in team.run(
                [partial(peer.all_reduced, torch.ones(())) for peer in team.peers]
            )
        ] == [3, 3, 3]


def test_a_job_that_ends_while_others_wait_is_an_error_and_no_hang(team: ThreadTeam) -> None:
    with pytest.raises(RuntimeError, match=r"thread 1 has ended while thread [02] waits"):
        team.run(
            [
                lambda: team.peers[0].all_reduced(torch.ones(1)),
                lambda: torch.ones(1),
                lambda: team.peers[2].all_reduced(torch.ones(1)),
            ]
        )
    with pytest.raises(ValueError, match="2 jobs for 3 threads"):
        team.run([lambda: 0, lambda: 1])


def test_closing_leaves_no_thread_and_none_was_a_daemon() -> None:
    team = ThreadTeam(2)
    mine = team.run([threading.current_thread, threading.current_thread])
    assert not any(thread.daemon for thread in mine)
    team.close()
    assert not any(thread.is_alive() for thread in mine)


def test_operations_keep_to_the_threads_of_who_made_the_team() -> None:
    """OpenMP would start as many as there are cores for each job, so that the jobs of a plan would
    fight for them.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    team = ThreadTeam(2)
    large = torch.ones(600, 600)

    def multiply() -> None:
        large @ large

    try:
        team.run([threading.get_ident] * 2)
        there = psutil.Process().num_threads()
        team.run([multiply] * 2)
        assert psutil.Process().num_threads() == there
    finally:
        team.close()
        torch.set_num_threads(before)
