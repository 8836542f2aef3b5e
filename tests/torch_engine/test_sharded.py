"""fsdp and hsdp by strategies/sharded, beside a plain loop, one device, and torch's FSDP2."""

import copy
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_models import (
    KINDS,
    InProcess,
    Result,
    assert_same,
    config_for,
    plain_loop,
    trained,
)
from torch import nn

from rank_runs import train_one_rank
from samecurve.checkpoint.format import load
from samecurve.core.planning.planner import plan
from samecurve.run.directory.attempt import Attempt
from samecurve.run.directory.run_directory import Run
from samecurve.tasks import open_task
from samecurve.torch_engine.model.sharded_parameter import ShardedParameter
from samecurve.torch_engine.optimizers.optimizer import is_sharded, local_view
from tiny import MACHINE
from worlds import JobFailedError, Pool

LAYOUTS = ["fsdp:2/2", "fsdp:2/3 once", "fsdp:4", "hsdp:4", "hsdp:4/2 once"]
IN_SHORT = {  # the others: make test-long
    *(("mixture", "fsdp:2/2"), ("read in block", "fsdp:2/2"), ("chunked", "hsdp:4")),
    *(("layer drop", "fsdp:2/2"), ("scalar", "hsdp:4/2 once"), ("penalised", "fsdp:2/3 once")),
}


class OwnPool:
    """A pool whose ranks shard models by strategies/sharded, or by torch's FSDP2."""

    def __init__(self, pool: Pool, code: str = "own") -> None:
        self._pool, self._code = pool, code

    def run(self, world: int, function: Any, *arguments: Any) -> Any:
        return self._pool.run(world, with_code, self._code, function, *arguments)


def with_code(index: int, group: Any, code: str, function: Any, *arguments: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "SAMECURVE_SHARDED", code)
        return function(index, group, *arguments)


def expected(kind: str, home: Path) -> Result:
    if kind == "layer drop":  # random: a plain loop draws other numbers
        return trained(InProcess(), home / "alone", config_for(kind))
    return plain_loop(kind)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(kind, layout, marks=() if (kind, layout) in IN_SHORT else pytest.mark.long)
        for kind in [*KINDS, "layer drop", "read in block", "backbones"]
        for layout in LAYOUTS
    ],
)
def test_one_curve(kind: str, layout: str, pool: Pool, tmp_path: Path) -> None:
    """A weight that is read anywhere, blocks that some ranks skip or call more often, and all
    others.
    """
    found = trained(OwnPool(pool), tmp_path / "sharded", config_for(kind, layout))
    assert_same(found, expected(kind, tmp_path))


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
    found = trained(OwnPool(pool), tmp_path / "sharded", config_for(kind, layout, exact=True))
    for name in (name for name in alone if name != "evaluated"):
        np.testing.assert_array_equal(found[name], alone[name], err_msg=name)


@pytest.mark.long  # each compiles, or runs blocks twice
@pytest.mark.parametrize("kind", ["method", "read", "scalar", "containers", "mixture"])
@pytest.mark.parametrize(
    "train", [{"recompute": "block"}, {"recompute": "selective"}, {"compile": True}], ids=str
)
def test_blocks_that_are_computed_again_or_compiled(
    kind: str, train: dict[str, Any], pool: Pool, tmp_path: Path
) -> None:
    found = trained(OwnPool(pool), tmp_path, config_for(kind, "fsdp:2/2", **train))
    assert_same(found, plain_loop(kind))


def test_a_checkpoint_goes_to_and_fro_between_it_and_fsdp2(pool: Pool, tmp_path: Path) -> None:
    """Legs of six steps: code, layout, the step before which the leg begins, and where it stops."""
    legs = [
        ("fsdp2", "fsdp:2", None, 2),
        ("own", "fsdp:2/2", 2, 4),
        ("own", "hsdp:4", 4, 5),
        ("fsdp2", "fsdp:4", 5, None),
    ]
    run = Run(tmp_path)
    for directory in (run.home, run.checkpoints, run.logs):
        directory.mkdir(parents=True, exist_ok=True)
    for code, layout, resume, stop_at in legs:
        config = config_for("fourier", layout, save_every=1, keep=0)
        made = plan(config, MACHINE, open_task(config, "").facts())
        run.write(config, made)
        saved = str(run.checkpoints / f"step-{resume:08d}") if resume else None
        attempt = Attempt("test", str(tmp_path), saved, stop_at)
        OwnPool(pool, code).run(made.world_size, train_one_rank, attempt.to_json())
    arrays = load(sorted(run.checkpoints.glob("step-*"))[-1]).arrays
    wanted = plain_loop("fourier")
    for name in (name for name in wanted if name.startswith("model/")):
        np.testing.assert_allclose(arrays[name], wanted[name], rtol=1e-12, atol=1e-12, err_msg=name)


def test_a_rank_that_leaves_the_order_ends_the_job_at_once() -> None:
    """It says so itself, and the others need no time-out of their collective (half an hour)."""
    own = Pool(2)  # a failed job costs a pool
    began = time.monotonic()
    try:
        with pytest.raises(JobFailedError, match=r"called in another order by some ranks"):
            OwnPool(own).run(2, in_another_order)
    finally:
        own.close()
    assert time.monotonic() - began < 60


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
