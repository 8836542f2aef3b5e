"""train.exact under fsdp and hsdp: the bits of one device, though every array is cut."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from one_curve import check_one_curve
from rank_runs import train_on_ranks
from samecurve.core.config.sections import Config, Optimizer
from samecurve.core.planning.planner import plan
from samecurve.features.ema.weight_average import WeightAverage
from samecurve.features.optimizers.adamw8bit.torch_optimizer import (
    TorchOptimizer as AdamW8bit,
)
from samecurve.tasks import open_task
from samecurve.torch_engine.optimizers import OptimizerParam
from samecurve.torch_engine.optimizers.vector_updates import VectorOptimizer
from samecurve.torch_engine.strategies.row_norm import norm_of_rows, squares_by_row
from tiny import MACHINE, config_of
from worlds import JobFailedError, Pool

HERE = Path(__file__).parent
BLOCKS = f"{HERE}/torch_engine/exact_blocks.py:Blocks"
MANY = ["ddp:3", "fsdp:2", "fsdp:3", "fsdp:4", "hsdp:4"]
MOVED = "fsdp:2..single..hsdp:4..dp:3..fsdp:3"


def blocks(kind: str = "", gather: str = "round", **train: Any) -> Config:
    """The first row of a microbatch says which blocks it uses, so it is coupled."""
    return config_of(
        {
            "task": BLOCKS,
            "model": {"kind": kind},
            "batch": {"samples": 10, "per_device": 2},
            "optimizer": {"lr": 1e-2, "clip": 0.5},
            "train": {"exact": True, "allow_coupled": True, **train},
            "devices": {"gather": gather},
        }
    )


@pytest.mark.parametrize(
    ("kind", "gather", "train", "layouts"),
    [
        ("empty", "round", {"recompute": "selective"}, ["hsdp:4"]),
        ("repeated", "step", {"precision": "bf16"}, ["fsdp:2"]),
        # in short, "step" in f32 is in the run that moves between both ways of gathering
        pytest.param("empty", "round", {"recompute": "selective"}, MANY, marks=pytest.mark.long),
        *(
            pytest.param(kind, gather, train, [*MANY, MOVED], marks=pytest.mark.long)
            for kind in ("", "repeated")
            for gather in ("round", "step")
            for train in (
                {},
                {"precision": "bf16"},
                {"precision": "f64"},
                {"precision": "bf16", "recompute": "block"},
                {"precision": "f32", "recompute": "selective", "ema": 0.9},
                {"precision": "f16"},
            )
        ),
    ],
)
def test_blocks_have_one_hash(
    kind: str, gather: str, train: dict[str, Any], layouts: list[str], *, pool: Pool, tmp_path: Path
) -> None:
    config = blocks(kind, gather, **train)
    verdicts = check_one_curve(config, layouts, pool, tmp_path, steps=5, near=0.0)
    assert len({verdict.hash for verdict in verdicts}) == 1


def test_a_copy_of_the_model_without_a_microbatch_takes_part(pool: Pool, tmp_path: Path) -> None:
    """The last step of an epoch has one microbatch: two ranks of hsdp have none. A weight is empty,
    too.
    """
    config = blocks("empty", gather="step").with_values(batch={"samples": 21})
    check_one_curve(config, ["hsdp:4"], pool, tmp_path, steps=4, near=0.0)


def test_uses_of_a_weight_do_not_share_a_copy_by_chance(pool: Pool, tmp_path: Path) -> None:
    """All threads of dp share the copies in two bytes that autocast keeps."""
    config = blocks("repeated", precision="bf16")
    layouts = ["dp:3", "dp:4"]
    verdicts = check_one_curve(config, layouts, pool, tmp_path, steps=5, near=0.0)
    assert len({verdict.hash for verdict in verdicts}) == 1


def test_a_run_moves_between_both_ways_of_gathering(pool: Pool, tmp_path: Path) -> None:
    """Ten samples in microbatches of two: 2 devices have 3 rounds, 3 devices have 2."""
    hashes = []
    moves: list[list[tuple[str, str, str, int | None]]] = [
        [("cpu:1", "single", "auto", None)],
        [
            ("cpu:2", "fsdp", "step", 2),
            ("cpu:3", "fsdp", "round", 3),
            ("cpu:4", "hsdp", "step", 4),
            ("cpu:2", "ddp", "auto", 5),
            ("cpu:3", "fsdp", "step", None),
        ],
    ]
    for number, legs in enumerate(moves):
        home, at, fixed = tmp_path / str(number), None, None
        for use, strategy, gather, stop_at in legs:
            config = blocks(steps=6, save_every=1, keep=0).with_values(
                devices={"use": use, "strategy": strategy, "gather": gather}
            )
            made = plan(config, MACHINE, open_task(config, "").facts(), fixed)
            assert made.layout.gathers_once == (gather == "step")
            events = train_on_ranks(pool, home, config, made, resume=at, stop_at=stop_at)
            at, fixed = stop_at, made.fixed
        hashes.append([one.values["hash"] for one in events if one.kind == "hashed"][-1])
    assert hashes[0] == hashes[1]


@pytest.mark.long
def test_a_gradient_that_comes_in_parts_is_refused(tmp_path: Path) -> None:
    devices = {"use": "cpu:2", "strategy": "fsdp"}
    config = blocks("reentrant", steps=2).with_values(devices=devices)
    made = plan(config, MACHINE, open_task(config, "").facts())
    own = Pool(2)  # a failed job costs a pool
    try:
        with pytest.raises(JobFailedError, match="adds to the same gradient several times"):
            train_on_ranks(own, tmp_path, config, made)
    finally:
        own.close()


def cuts(rows: int, shards: int) -> list[slice]:
    """The rows of each shard, as a Weight cuts them."""
    piece = -(-rows // shards)
    return [slice(begin, begin + piece) for begin in range(0, rows, piece)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_rows_sum_of_squares_is_the_same_alone_and_among_others(
    dtype: torch.dtype, threads: int
) -> None:
    """Also of rows that are long enough for several threads."""
    before = torch.get_num_threads()
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 70_001), (2, 40_000, 2), (3, 1023), (41, 1025), (64, 3, 3), (1000,), ()]
    try:
        for shape in shapes:
            array = torch.randn(shape, generator=generator).to(dtype)
            torch.set_num_threads(1)
            whole = squares_by_row(array)
            torch.set_num_threads(threads)
            assert torch.equal(squares_by_row(array), whole)
            for shards in (2, 3, 5, 1000) if shape else ():
                parts = [squares_by_row(array[rows].clone()) for rows in cuts(shape[0], shards)]
                assert torch.equal(torch.cat(parts), whole), (shape, shards)
            norm = torch.linalg.vector_norm(array.double())
            near = 1e-2 if dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(norm_of_rows(whole.clone()), norm, rtol=near, atol=0)
    finally:
        torch.set_num_threads(before)


def updated(
    name: str, whole: torch.Tensor, gradients: list[torch.Tensor], rows: slice
) -> dict[str, torch.Tensor]:
    """The weights of some rows, the optimizer's state and the moving average after some updates."""
    fields = Optimizer(name=name, momentum=0.9)
    view = torch.nn.Parameter(whole[rows].clone())
    param = OptimizerParam("weight", torch.nn.Parameter(whole), view)
    optimizer: Any
    if name == "adamw8bit":
        setup: Any = SimpleNamespace(optimizer=fields)
        optimizer = AdamW8bit(setup, [param])
    else:
        optimizer = VectorOptimizer(fields, [param])
    strategy: Any = None
    average = WeightAverage(0.99, [replace(param, parameter=view)], strategy)
    average.begin()
    for gradient in gradients:
        view.grad = gradient[rows] * torch.tensor(0.37, dtype=gradient.dtype)
        optimizer.step(1e-2, finite=True)
        average.add(finite=True)
    return {"weights": view.detach(), "average": average.values[0], **optimizer.state_of(param)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["adamw", "sgd", "adamw8bit"])
def test_updates_of_parts_are_those_of_the_whole(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = [(101, 64)] if name == "adamw8bit" else [(101, 37), (4099,), (13, 5, 3), (7,)]
    for shape in shapes:
        draw = partial(torch.randn, shape, generator=generator, dtype=dtype)
        weights, gradients = draw(), [draw() for _ in range(4)]
        whole = updated(name, weights, gradients, slice(None))
        for shards in (2, 3, 7):
            parts = [updated(name, weights, gradients, rows) for rows in cuts(shape[0], shards)]
            for key, value in whole.items():
                together = torch.cat([part[key] for part in parts])
                assert torch.equal(together, value), (shape, shards, key)
