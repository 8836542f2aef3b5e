"""train.exact: one hash of parameters and optimizer state, whatever computed it; and a look at the
ordinary mode, whose bits do differ.
"""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import (
    free_port,
    samecurve,
    started,
    steps_written,
    until,
    write_config,
)
from one_curve import check_one_curve
from samecurve.core.planning.planner import plan
from samecurve.data.feed import Feed
from samecurve.errors import UserError
from samecurve.observe import read_events
from samecurve.probe import probe
from samecurve.tasks import open_task
from samecurve.torch_engine.engine import TorchEngine
from samecurve.torch_engine.precision import set_deterministic
from samecurve.torch_engine.process_group import Comm
from samecurve_products.report.compare.compare_runs import compare, describe_comparison
from tiny import MACHINE, Outcome, TinyRun, config_of, tiny_values, train_tiny
from worlds import Pool

STEPS = 100
ALL = [
    *(("ddp", world) for world in (2, 3, 4)),
    *(("dp", world) for world in (2, 3)),
    *(("fsdp", world) for world in (2, 3, 4)),
    ("hsdp", 4),
]
LAYOUTS = {
    "f32": [("ddp", 2), ("dp", 2), ("fsdp", 2), ("fsdp", 3)],
    "bf16": [("ddp", 3), ("fsdp", 2)],
    "f64": [("ddp", 4), ("hsdp", 4)],
}
JAX = [*(("dp", world) for world in (1, 2, 3, 4, 8)), *(("fsdp", world) for world in (2, 3, 4, 8))]
SOME = 20  # steps of make test


Train = Callable[..., Outcome]


@pytest.fixture(scope="module")
def train(pool: Pool, corpus: Path, cache: Path) -> Train:
    """Trains the tiny run with train.exact in a directory. section: more of the config's `train`.

    Batch 10 is 5 microbatches of 2, an epoch's tail of 3 two, token counts differ by sample: no
    world divides any of it evenly.
    """

    def run(
        home: Path,
        strategy: str,
        world: int,
        *,
        precision: str = "f32",
        engine: str = "torch",
        **section: Any,
    ) -> Outcome:
        exact = {"steps": STEPS, "precision": precision, "exact": True, "hash_every": 10}
        devices = {"use": f"cpu:{world}", "strategy": strategy}
        config = tiny_values(corpus, train={**exact, **section}, devices=devices)
        processes = 1 if strategy == "dp" or engine == "jax" else world
        tiny = TinyRun(home, {**config, "engine": engine}, cache)
        outcome: Outcome = pool.run(processes, train_tiny, tiny)[0]
        return outcome

    return run


def same(outcome: Outcome, expected: Outcome) -> bool:
    """To the last bit, on every step."""
    return (
        outcome.hashes,
        outcome.losses,
        outcome.norms,
        [e["loss"] for e in outcome.evaluated],
    ) == (
        expected.hashes,
        expected.losses,
        expected.norms,
        [e["loss"] for e in expected.evaluated],
    )


@pytest.mark.parametrize(
    ("precision", "layouts", "steps"),
    [
        *(
            pytest.param(*case, SOME, marks=[pytest.mark.long] * (case[0] != "f32"))
            for case in LAYOUTS.items()
        ),
        *(pytest.param(precision, ALL, STEPS, marks=pytest.mark.long) for precision in LAYOUTS),
    ],
)
def test_one_hash_on_any_number_of_devices(
    *,
    precision: str,
    layouts: list[tuple[str, int]],
    steps: int,
    train: Train,
    tmp_path: Path,
) -> None:
    """Also the losses, norms and evaluations of every step, counted along the same tree."""
    expected = train(tmp_path / "one", "single", 1, precision=precision, steps=steps)
    assert len(expected.hashes) == steps // 10
    for strategy, world in layouts:
        outcome = train(
            tmp_path / f"{strategy}-{world}", strategy, world, precision=precision, steps=steps
        )
        plan = outcome.plan
        assert (plan.layout.strategy, plan.layout.num_devices, plan.batch.micro_batch_size) == (
            strategy,
            world,
            2,
        )
        assert same(outcome, expected), (strategy, world)


def test_the_ordinary_mode_differs_and_so_do_other_microbatches(
    train: Train, pool: Pool, corpus: Path, cache: Path, tmp_path: Path
) -> None:
    """So the tests above can fail: without the tree, or with another cut of the batch, the bits are
    others within a few steps.
    """
    short: dict[str, Any] = {"train": {"steps": 10, "precision": "f32"}}
    ordinary = [
        pool.run(
            world,
            train_tiny,
            TinyRun(
                tmp_path / f"{world}",
                {
                    **tiny_values(corpus, **short, devices=devices),
                    "batch": {"samples": 10, "per_device": 2},
                },
                cache,
            ),
        )[0]
        for world, devices in (
            (1, {"use": "cpu:1"}),
            (3, {"use": "cpu:3"}),
            (2, {"use": "cpu:2", "strategy": "fsdp"}),
        )
    ]
    one, *several = ordinary
    for other in several:
        assert other.losses != one.losses
        pairs = zip(one.arrays.values(), other.arrays.values(), strict=True)
        assert any((a != b).any() for a, b in pairs)
    exact = train(tmp_path / "exact", "ddp", 3, steps=10)
    other = pool.run(
        1,
        train_tiny,
        TinyRun(
            tmp_path / "microbatches",
            {
                **tiny_values(corpus, train={**short["train"], "exact": True}),
                "batch": {"samples": 10, "per_device": 5},
            },
            cache,
        ),
    )[0]
    assert exact.hashes[10] != other.hashes[10]


@pytest.mark.parametrize(
    ("precision", "layouts"),
    [
        ("f32", [("fsdp", 2)]),
        pytest.param("f32", JAX, marks=pytest.mark.long),
        pytest.param("bf16", [("dp", 3), ("fsdp", 3)], marks=pytest.mark.long),
        pytest.param("f64", [("dp", 2), ("fsdp", 4)], marks=pytest.mark.long),
    ],
)
def test_jax_one_hash_on_any_number_of_devices(
    precision: str, layouts: list[tuple[str, int]], train: Train, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"engine": "jax", "precision": precision}
    options["steps"] = STEPS if len(layouts) > 2 else 20
    expected = train(tmp_path / "one", "single", 1, **options)
    for strategy, world in layouts:
        outcome = train(tmp_path / f"{strategy}-{world}", strategy, world, **options)
        assert same(outcome, expected), (strategy, world)


def hashes(home: Path) -> dict[int, str]:
    return {
        event.step: event.values["hash"]
        for event in read_events(home / "journal.jsonl")
        if event.kind == "hashed"
    }


@pytest.mark.long
@pytest.mark.parametrize(
    ("killed", "stopped"),
    [
        (["cpu:2"], ["cpu:3"]),
        (["cpu:2", "--strategy", "fsdp"], ["cpu:4", "--strategy", "hsdp"]),
        (["cpu:3", "--strategy", "fsdp"], ["cpu:2", "--strategy", "dp"]),
    ],
)
def test_killed_and_moved_and_still_the_same_bits(
    killed: list[str], stopped: list[str], tmp_path: Path, corpus: Path
) -> None:
    """kill -9 in the middle on some ranks, gone on with on others, stopped, and ended on one: the
    hashes and steps of a run that was left alone, which compare-runs sees too.
    """
    train = [
        "train",
        "-f",
        write_config(tmp_path, corpus, 40, 10),
        "--exact",
        "--dtype",
        "f32",
        "--set",
        "train.hash_every=5",
    ]
    samecurve(*train, "--save-dir", "whole", cwd=tmp_path)
    moved = [*train, "--save-dir", "moved"]
    with started(*moved, "--devices", *killed, cwd=tmp_path) as live:
        until(lambda: steps_written(tmp_path / "moved") >= 13)
        os.kill(live.pid, signal.SIGKILL)
        live.communicate(timeout=60)
    assert (
        "exact: 5 microbatches of 2 a step"
        in samecurve(*moved, "--devices", *stopped, "--stop-after", "11", cwd=tmp_path).stdout
    )
    samecurve(*moved, cwd=tmp_path)
    assert hashes(tmp_path / "moved") == hashes(tmp_path / "whole")
    assert sorted(hashes(tmp_path / "whole")) == [*range(5, 45, 5)]
    assert (
        samecurve("compare-runs", "whole", "moved", cwd=tmp_path).stdout
        == "equal  whole and moved, to the last bit: 40 steps (loss, grad_norm), 8 hashes of the"
        " state, the arrays saved at step 40\n"
    )


@pytest.mark.long
def test_jax_on_two_hosts_has_the_same_bits(tmp_path: Path, corpus: Path) -> None:
    """Two processes with a device each, then one with two."""
    train = [
        "train",
        "-f",
        write_config(tmp_path, corpus, 20, 10),
        "--engine",
        "jax",
        "--exact",
        "--dtype",
        "f32",
        "--set",
        "train.hash_every=5",
    ]
    samecurve(*train, "--devices", "cpu:2", "--save-dir", "one", cwd=tmp_path)
    port = free_port()
    hosts = [
        [
            *train,
            "--devices",
            "cpu:1",
            "--save-dir",
            "two",
            "--nnodes",
            2,
            "--rdzv",
            f"127.0.0.1:{port}",
            "--node-rank",
            node,
        ]
        for node in (0, 1)
    ]
    with started(*hosts[0], cwd=tmp_path) as first, started(*hosts[1], cwd=tmp_path) as second:
        said = first.communicate(timeout=120)[0]
        assert (first.returncode, second.wait(60)) == (0, 0), said
    assert hashes(tmp_path / "one") == hashes(tmp_path / "two")


OWN_TASK = """
import numpy as np
from torch import nn
from samecurve import Mean


class Rows:
    def __len__(self):
        return 45

    def __getitem__(self, ids):
        return {{"x": (ids[:, None] * np.arange(1, 25) % 7).astype(np.float32)}}


def net():
    wide = nn.utils.spectral_norm(nn.Linear(24, 64))  # moves a buffer in each forward pass
    return nn.Sequential(wide, nn.Tanh(), nn.Dropout(0.2), nn.Linear(64, 1))


class Task:
    def __init__(self):
        self.kept = net()

    def model(self):
        return {model}

    def loss(self, model, batch):
        x = batch["x"] + {noise}
        errors = (model(x) - x.mean(-1, keepdim=True)).square()
        return Mean(errors.sum(), errors.numel())

    def train_data(self):
        return Rows()

    eval_data = train_data
"""


@pytest.mark.parametrize(
    ("model", "noise"),
    [("net()", "0.0"), ("net()", "0.01 * float(np.random.rand())"), ("self.kept", "0.0")],
)
def test_cores_change_no_bit(model: str, noise: str, tmp_path: Path) -> None:
    """One rank, and one for each core: an epoch's tail, dropout, a buffer that moves once a step; a
    generator, or a model, that the task keeps.
    """
    (tmp_path / "own.py").write_text(OWN_TASK.format(model=model, noise=noise))
    (tmp_path / "own.yaml").write_text("task: own.py:Task\nbatch: {samples: 16}\n")
    shared = ["train", "-f", "own.yaml", "--exact", "--set", "train.eval_every=3"]
    for name, asked in (("one", ["--devices", "cpu"]), ("all", [])):
        samecurve(*shared, *asked, "--max-steps", "6", "--save-dir", name, cwd=tmp_path)
    devices = json.loads((tmp_path / "all" / "plan.json").read_text())["plan"]["devices"]
    assert len(devices) == max(1, min(8, probe().cores // (probe().threads or 1)))
    said = samecurve("compare-runs", "one", "all", cwd=tmp_path).stdout
    assert said.startswith("equal  one and all, to the last bit: 6 steps")
    if (model, noise) == ("net()", "0.0"):
        profiled = samecurve("profile", *shared[1:], cwd=tmp_path).stdout
        assert "forward" in profiled


def test_a_race_in_one_gradient_is_found_by_its_array(tmp_path: Path) -> None:
    """The worked example of docs/exact.md: two runs of examples/race.yaml part, and compare-runs
    names the array in which they do.
    """
    root = Path(__file__).parents[1]
    for name in ("one", "two"):
        samecurve(
            "train",
            "-f",
            "examples/race.yaml",
            "--exact",
            "--set",
            "train.hash_every=1",
            "--set",
            "optimizer.clip=0",
            "--set",
            "train.sentinel=100",
            "--set",
            "train.on_sentinel=warn",
            "--save-dir",
            tmp_path / name,
            cwd=root,
        )
    comparison = compare(tmp_path / "one", tmp_path / "two")
    assert comparison.arrays == [
        "model/second.weight",
        "optimizer/exp_avg/second.weight",
        "optimizer/exp_avg_sq/second.weight",
    ]
    assert comparison.metric is not None
    assert comparison.arrays_at is not None
    # The norm of the gradient at fault may part in the same step as its weight, a loss only after
    # it; either later, if the difference is small.
    assert comparison.arrays_at + (comparison.metric.what == "loss") <= comparison.metric.step
    assert describe_comparison(comparison, tmp_path / "one", tmp_path / "two")[0].startswith(
        f"differ step {comparison.arrays_at}: model/second.weight, "
    )


ODD = f"{Path(__file__).parent}/torch_engine/odd.py:Odd"


@pytest.mark.parametrize(
    "batch",
    [{"samples": 10, "per_device": 1}, pytest.param({"samples": 3}, marks=pytest.mark.long)],
)
def test_odd_models_have_one_hash_too(batch: dict[str, int], pool: Pool, tmp_path: Path) -> None:
    """A parameter that few samples use, transposed ones, a shared layer; more microbatches than
    devices, and fewer.
    """
    config = config_of(
        {
            "task": ODD,
            "batch": batch,
            "optimizer": {"lr": 1e-2},
            "train": {"exact": True, "allow_coupled": True},  # the first row says how
        }
    )
    layouts = ["dp:3", "ddp:2..single..ddp:3"] + ["ddp:3", "ddp:4"] * (batch == {"samples": 3})
    verdicts = check_one_curve(config, layouts, pool, tmp_path, steps=5, near=0.0)
    assert len({verdict.hash for verdict in verdicts}) == 1


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("reentrant", "adds to the same gradient several times"),
        ("sparse", "sparse gradients"),
    ],
)
def test_what_follows_the_device_is_refused_at_the_first_step(kind: str, says: str) -> None:
    config = config_of(
        {
            "task": ODD,
            "model": {"kind": kind},
            "batch": {"samples": 4},
            "train": {"exact": True, "steps": 2},
        }
    )
    run_plan = plan(config, MACHINE, open_task(config, "").facts())
    task = open_task(config, "")
    engine = TorchEngine(task, run_plan, config.optimizer, Comm(), [torch.device("cpu")])
    feed = Feed(
        run_plan, run_plan.layout.devices_of(0), task.train_data(), None, engine.stage, prefetch=0
    )
    try:
        state = engine.init()  # which puts the step together
        with pytest.raises(UserError, match=says):
            engine.step(state, next(iter(feed))[1], 1e-3, [0] * 4)
    finally:
        set_deterministic(False, torch.device("cpu"))
