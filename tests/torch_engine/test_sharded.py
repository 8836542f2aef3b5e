"""fsdp and hsdp: every kind of model has the bits of one device, ranks that part say so, and what a
parameter in shards is.
"""

import copy
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_models import KINDS, InProcess, assert_same, config_for, plain_loop, trained
from torch import nn

from samecurve.core.planning.planner import plan
from samecurve.tasks import open_task
from samecurve.torch_engine.model.sharded_parameter import ShardedParameter
from samecurve.torch_engine.optimizers import is_sharded, local_view
from tiny import MACHINE
from worlds import JobFailedError, Pool


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(kind, layout, marks=() if (kind, layout) in chosen else pytest.mark.long)
        for chosen in [{("fourier", "fsdp:2"), ("skips", "hsdp:4"), ("late", "hsdp:4 once")}]
        for kind in KINDS
        if kind != "reentrant"  # refused
        for layout in ("fsdp:2", "fsdp:4", "hsdp:4", "fsdp:2 once", "hsdp:4 once")
    ],
)
def test_the_bits_of_one_device(kind: str, layout: str, pool: Pool, tmp_path: Path) -> None:
    alone = trained(InProcess(), tmp_path / "alone", config_for(kind, exact=True))
    found = trained(pool, tmp_path / "sharded", config_for(kind, layout, exact=True))
    for name in (name for name in alone if name != "evaluated"):
        np.testing.assert_array_equal(found[name], alone[name], err_msg=name)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in {"skips", "chunked", "read"} else pytest.mark.long)
        for kind in [*KINDS, "layer drop"]
    ],
)
def test_blocks_that_stay_whole_until_backward(kind: str, pool: Pool, tmp_path: Path) -> None:
    """devices.reshard: false."""
    config = config_for(kind, "fsdp:2/2").with_values(devices={"reshard": False})
    expected = plain_loop(kind)
    if kind == "layer drop":  # random: a plain loop draws other numbers
        expected = trained(InProcess(), tmp_path / "alone", config_for(kind))
    assert_same(trained(pool, tmp_path / "sharded", config), expected)


def test_a_rank_that_leaves_the_order_ends_the_job_at_once() -> None:
    """The rank says so itself, within seconds with the ranks' start. The others need no time-out of
    their collective, which is half an hour.
    """
    own = Pool(2)  # a failed job costs a pool
    began = time.monotonic()
    try:
        with pytest.raises(JobFailedError, match=r"called in another order by some ranks"):
            own.run(2, in_another_order)
    finally:
        own.close()
    assert time.monotonic() - began < 30


def in_another_order(index: int, group: Any) -> None:
    """The second rank calls the layers in the opposite order once all know one order."""
    from samecurve.worker.join import join_warm

    config = config_for("method", "fsdp:2")
    task = open_task(config, "")
    made = plan(config, MACHINE, task.facts())
    engine: Any = join_warm(made, index, group).make_engine(task, config.optimizer)
    engine.init()
    strategy, x = engine._strategy, torch.ones(2, 8, dtype=torch.float64)

    def called(model: Any, turns: Any) -> torch.Tensor:
        y = x
        for number in turns:
            y = model.layers[number](y)
        return y

    for turns in ([0, 1], [0, 1], [1, 0] if index else [0, 1]):
        with torch.no_grad():
            strategy.call(0, called, turns)


def sharded_parameter(gathered: torch.Tensor | None) -> ShardedParameter:
    own = nn.Parameter(torch.ones(2, 3))
    outline = torch.empty(4, 3)
    return ShardedParameter.of(outline, own, lambda: gathered, first_row=2, is_cut=True)


def test_a_sharded_parameter_says_what_it_is_without_its_values() -> None:
    parameter = sharded_parameter(None)
    assert (parameter.shape, parameter.numel(), parameter.requires_grad) == ((4, 3), 12, True)
    assert isinstance(parameter, nn.Parameter)
    assert is_sharded(parameter.detach())
    assert local_view(parameter.detach()).shape == (2, 3)
    parameter.grad = torch.zeros(2, 3)
    assert parameter.own_rows.grad is parameter.grad
    parameter.requires_grad_(False)
    assert not parameter.requires_grad
    module = nn.Module()
    module.weight = parameter
    assert list(module.state_dict()) == ["weight"]


def test_a_sharded_parameter_is_read_in_a_pass_only() -> None:
    reads: list[Any] = [lambda one: one + 1, lambda one: one.T, lambda one: one.tolist()]
    for read in [*reads, copy.deepcopy]:
        with pytest.raises(RuntimeError, match=r"a weight is read outside of loss\(\)"):
            read(sharded_parameter(None))
    whole = torch.arange(12.0).view(4, 3)
    torch.testing.assert_close(sharded_parameter(whole).T, whole.T)
    torch.testing.assert_close(
        nn.functional.linear(torch.ones(1, 3), sharded_parameter(whole)), whole.sum(1)[None]
    )
