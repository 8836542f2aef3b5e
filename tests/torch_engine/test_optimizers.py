"""The config's optimizers whose updates look at whole matrices: each as its authors' in torch, one
curve under every strategy and through moves between them, its state as large as planned.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from one_curve import check_one_curve, compare
from samecurve.core.config.document import Document
from samecurve.core.config.loading import load
from samecurve.core.config.sections import Config
from samecurve.core.events import REQUESTS
from samecurve.core.planning.planner import plan
from samecurve.data.feed import Feed
from samecurve.errors import UserError
from samecurve.tasks import Tasks, open_task
from samecurve.torch_engine.checkpoint import State
from samecurve.torch_engine.engine import TorchEngine
from samecurve.torch_engine.model import cast_weights
from samecurve.torch_engine.process_group import Comm
from tiny import MACHINE
from worlds import Pool

HERE = Path(__file__).parent
ASKED = [0] * len(REQUESTS)
RATES = {"adafactor": 0.02}
# Every strategy, worlds that divide no parameter, and moves between them in mid-run
LAYOUTS = ["dp:2", "ddp:3", "fsdp:3", "fsdp:2..single..ddp:2..fsdp:3"]
MORE = ["ddp:2", "fsdp:2", "hsdp:4", "fsdp:4", "dp:3..fsdp:2..hsdp:4..ddp:3", "ddp:2..dp:2"]


def config_of(name: str, **sections: Any) -> Config:
    values = {
        "task": f"{HERE}/matrices.py:Matrices",
        "batch": {"samples": 10},
        "devices": {"use": "cpu"},
        "schedule": {"warmup": 2},
        **sections,
    }
    values["optimizer"] = {"name": name, "lr": RATES[name], **sections.get("optimizer", {})}
    values["train"] = {"steps": 8, "precision": "f64", **sections.get("train", {})}
    return load(Document(values), Tasks()).config


def opened(config: Config) -> tuple[TorchEngine, Feed]:
    """An engine on one device of this process, and what feeds it."""
    task = open_task(config, "")
    made = plan(config, MACHINE, task.facts())
    engine = TorchEngine(task, made, config.optimizer, Comm(), [torch.device("cpu")])
    return engine, Feed(made, made.devices_of(0), task.train_data(), None, engine.stage, prefetch=0)


Make = Callable[[Mapping[str, torch.nn.Parameter]], list[torch.optim.Optimizer]]


def check_plain_loop(config: Config, make: Make) -> State:
    """Losses of the engine are those of a loop with torch's own optimizers, which are driven by the
    schedule; so are the weights in the end. make: the optimizers of parameters by name
    """
    engine, feed = opened(config)
    state = engine.init()
    model = cast_weights(engine.task.model(), "f64")
    model.load_state_dict({name: one.clone() for name, one in state.model.state_dict().items()})
    optimizers = make(dict(model.named_parameters()))
    for step, batch in feed:
        rows = {
            name: torch.cat([micro.arrays[name] for round_ in batch.rounds for micro in round_])
            for name in ("words", "next")
        }
        mean = engine.task.loss(model, rows)
        model.zero_grad()
        torch.autograd.backward(mean.sum / mean.weight)
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = engine.plan.lr_at(step)
            optimizer.step()
        state, metrics = engine.step(state, batch, engine.plan.lr_at(step), ASKED)
        assert metrics.read().loss == pytest.approx(mean.sum.item() / mean.weight, rel=1e-12)
    for name, parameter in model.named_parameters():
        trained = state.model.get_parameter(name)
        torch.testing.assert_close(trained, parameter, rtol=0, atol=1e-12, msg=name)
    return state


def test_adafactor_is_torchs() -> None:
    """Over eight steps, with the config's decay on matrices."""

    def make(named: Mapping[str, torch.nn.Parameter]) -> list[torch.optim.Optimizer]:
        matrices = [one for one in named.values() if one.ndim > 1]
        vectors = [one for one in named.values() if one.ndim < 2]
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": vectors},
        ]
        return [torch.optim.Adafactor(groups)]

    state = check_plain_loop(config_of("adafactor"), make)
    sizes = {
        name: tuple(tensor.shape)
        for param in state.trained
        if param.name in {"embed.weight", "layers.0.experts", "head.bias"}
        for name, tensor in state.optimizer.state_of(param).items()
    }
    assert sizes == {"row_var": (3, 8, 1), "col_var": (3, 1, 5), "variance": (11,)}


@pytest.mark.parametrize("name", RATES)
@pytest.mark.parametrize(
    "layouts", [LAYOUTS, pytest.param(MORE, marks=pytest.mark.long)], ids=["main", "more"]
)
def test_it_is_one_curve(name: str, layouts: list[str], pool: Pool, tmp_path: Path) -> None:
    """Losses, norms, weights and the optimizer's state."""
    check_one_curve(config_of(name), layouts, pool, tmp_path, steps=4, near=1e-11)


class Faulty:
    """A pool whose ranks take each shard for the whole parameter."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def run(self, world: int, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return self._pool.run(world, with_local_statistics, function, *arguments, **options)


def with_local_statistics(
    index: int, group: Any, function: Callable[..., Any], *arguments: Any
) -> Any:
    from samecurve.torch_engine.strategies.replicated import Single
    from samecurve.torch_engine.strategies.sharded import FSDP

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FSDP, "sum_over_parts", Single.sum_over_parts)
        return function(index, group, *arguments)


@pytest.mark.parametrize("name", RATES)
def test_statistics_of_a_shard_alone_are_seen(name: str, pool: Pool, tmp_path: Path) -> None:
    faulty: Any = Faulty(pool)
    (verdict,) = compare(config_of(name), ["fsdp:2"], faulty, tmp_path, steps=3, near=1e-6)
    assert verdict.verdict == "FAIL"


@pytest.mark.parametrize("name", RATES)
def test_its_state_is_as_large_as_planned(name: str) -> None:
    engine, _ = opened(config_of(name))
    state = engine.init()
    held = sum(
        tensor.nbytes
        for param in state.trained
        for tensor in state.optimizer.state_of(param).values()
    )
    planned = {term.name: term.bytes for term in engine.plan.memory}
    assert held == planned["optimizer"] < 2 * planned["weights"]


@pytest.mark.parametrize("name", RATES)
def test_engine_jax_refuses_it(name: str) -> None:
    config = config_of(name).model_copy(update={"engine": "jax"})
    facts = open_task(config_of(name), "").facts()
    with pytest.raises(UserError, match=f"optimizer {name} is for engine torch") as refused:
        plan(config, MACHINE, facts)
    assert "--engine torch" in refused.value.remedy
