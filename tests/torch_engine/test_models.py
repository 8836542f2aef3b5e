"""Models as people write them, under every strategy, beside a plain loop over whole batches."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from samecurve.checkpoint.format import load
from samecurve.core.config.sections import Config
from samecurve.core.planning.plan import plan
from samecurve.observe.journal import read_events
from samecurve.run.attempt import Attempt
from samecurve.run.directory import Run
from samecurve.tasks import open_task
from samecurve.torch_engine.model import cast_weights
from samecurve.worker.context import RankContext
from samecurve.worker.join import join_warm
from samecurve.worker.main import Requests, train_rank
from tiny import MACHINE, config_of
from worlds import Pool

HERE = Path(__file__).parent
STEPS = 6  # two epochs

Result = dict[str, Any]  # losses, and the last weights by name


def config_for(kind: str, layout: str = "single:1", **train: Any) -> Config:
    """layout: strategy:devices, or strategy:devices/accumulation."""
    strategy, _, count = layout.partition(":")
    devices, _, accumulate = count.partition("/")
    return config_of(
        {
            "task": f"{HERE}/models.py:Task",
            "model": {"kind": kind},
            "batch": {"samples": 10, "accumulate": int(accumulate or 1)},
            "optimizer": {"lr": 1e-2, "clip": 0.0},
            "train": {"steps": STEPS, "precision": "f64", **train},
            "devices": {"use": f"cpu:{devices}", "strategy": strategy, "preflight": 0},
        }
    )


def trained(pool: Pool, home: Path, config: Config) -> Result:
    made = plan(config, MACHINE, open_task(config, "").facts())
    run = Run(home)
    for directory in (run.home, run.checkpoints, run.logs):
        directory.mkdir(parents=True, exist_ok=True)
    run.write(config, made)
    pool.run(made.world_size, train_one, str(home))
    losses = [e.values["loss"] for e in read_events(run.journal) if e.kind == "step"]
    arrays = load(sorted(run.checkpoints.glob("step-*"))[-1]).arrays
    return {"losses": losses} | {n: arrays[n].copy() for n in arrays if n.startswith("model/")}


def train_one(index: int, group: Any, home: str) -> None:
    context = RankContext.read_warm(Attempt("test", home).to_json(), index)
    task = open_task(context.config, "")
    engine = join_warm(context.plan, index, group).make_engine(task, context.config.optimizer)
    train_rank(context, engine, task, Requests(None))


def plain_loop(kind: str) -> Result:
    """What anybody would write for one device. Gradients are zeroed, not dropped."""
    config = config_for(kind)
    task = open_task(config, "")
    made = plan(config, MACHINE, task.facts())
    with torch.random.fork_rng():
        torch.manual_seed(made.fixed.seed)
        model = cast_weights(task.model(), "f64")
    named = dict(model.named_parameters())
    decay = config.optimizer.weight_decay
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in named.values() if p.ndim >= 2], "weight_decay": decay},
            {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0},
        ],
        betas=config.optimizer.betas,
        eps=config.optimizer.eps,
    )
    losses = []
    model.train()
    for step, ids in enumerate(made.order.ids(range(made.steps))):
        for group in optimizer.param_groups:
            group["lr"] = made.lr_at(step)
        for parameter in named.values():
            parameter.grad = torch.zeros_like(parameter)
        batch = {n: torch.from_numpy(a) for n, a in task.train_data()[ids].items()}
        total, weight = task.loss(model, batch)
        (total / weight).backward()
        optimizer.step()
        losses.append(total.item() / weight)
    values = {f"model/{n}": t.detach() for n, t in {**named, **dict(model.named_buffers())}.items()}
    return {"losses": losses} | {
        n: (torch.view_as_real(t) if t.is_complex() else t).numpy() for n, t in values.items()
    }


def assert_same(found: Result, expected: Result) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-12, atol=1e-12, err_msg=name)


LAYOUTS = ["single:1/3", "dp:2", "ddp:2/2", "fsdp:2/2", "hsdp:4"]
KINDS = ["method", "dict", "read", "scalar", "containers", "reentrant", "seldom", "mixture"]
IN_SHORT = {  # the others: make test-long
    *((kind, "fsdp:2/2") for kind in KINDS),
    *((kind, "ddp:2/2") for kind in ("dict", "read", "reentrant", "seldom", "mixture")),
    *(("mixture", layout) for layout in LAYOUTS),
}


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(kind, layout, marks=() if (kind, layout) in IN_SHORT else pytest.mark.long)
        for kind in KINDS
        for layout in LAYOUTS
    ],
)
def test_one_curve(kind: str, layout: str, pool: Pool, tmp_path: Path) -> None:
    assert_same(trained(pool, tmp_path, config_for(kind, layout)), plain_loop(kind))
