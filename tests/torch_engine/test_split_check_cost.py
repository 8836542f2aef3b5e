"""What the split check costs before the first step: memory, and passes through the model."""

import gc
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from typing import Any
from unittest.mock import patch

import numpy as np
import torch.distributed as dist
from test_split_check import config_for, feed_of, opened
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from live_bytes import LiveBytes
from samecurve import Mean
from samecurve.core.config.sections import Config
from samecurve.torch_engine.optimizers import local_view
from samecurve.torch_engine.process_group import Comm
from worlds import Pool

WIDTH, LAYERS = 128, 16


class Wide:
    """Weights are most of what its step holds."""

    def model(self) -> nn.Module:
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
        layers[0].weight.data.zero_()
        return nn.Sequential(*layers)

    def loss(self, model: Any, batch: Mapping[str, Tensor]) -> Mean:
        return Mean(model(batch["x"]).square().sum(), len(batch["x"]))

    def train_data(self) -> Any:
        return Vectors()


class Measured(Wide):
    """It logs means beside the loss."""

    def loss(self, model: Any, batch: Mapping[str, Tensor]) -> Any:
        loss = super().loss(model, batch)
        return {"loss": loss, "twice": Mean(2 * loss.sum, loss.weight), "again": loss}


class Ring(Wide):
    """Its model holds itself, as a layer whose forward() a library has replaced does."""

    def model(self) -> nn.Module:
        model = super().model()
        model.forward = partial(type(model).forward, model)
        return model


class Vectors:
    def __len__(self) -> int:
        return 40

    def __getitem__(self, ids: Any) -> dict[str, Any]:
        return {"x": np.stack([np.random.default_rng(int(i)).normal(size=WIDTH) for i in ids])}


def config_of_wide(rounds: int, kind: str = "Wide", **devices: str) -> Config:
    return config_for(
        "",
        task=f"{__file__}:{kind}",
        batch={"samples": 10, "accumulate": rounds},
        train={"precision": "f32", "steps": 4},
        devices=devices,
    )


def with_engine(run: Callable[[Any, Any], int], rounds: int, kind: str = "Wide") -> int:
    with opened(config_of_wide(rounds, kind)) as engine:
        return run(engine, engine.init())


def look_at_own(state: Any) -> None:
    """Have this process's weights, and what their optimizer keeps, counted as held."""
    moments = [state.optimizer.state_of(param).values() for param in state.trained]
    for tensor in (*state.model.parameters(), *chain.from_iterable(moments)):
        local_view(tensor.detach()).view(-1)


def tenths_held(engine: Any, state: Any) -> int:
    """Memory that the check holds at most, beyond this process's weights and moments; in tenths of
    the whole weights.
    """
    rows = feed_of(engine).trial_rows(5)
    weights = sum(parameter.numel() * parameter.itemsize for parameter in state.model.parameters())
    with LiveBytes() as held:
        look_at_own(state)
        own = held.now
        engine.begin_training(state, rows)
    return int(10 * (held.peak - own) / weights + 0.5)


def test_the_check_holds_no_more_than_the_first_step() -> None:
    """A step of AdamW holds the gradient and two states beside the weights."""
    assert with_engine(tenths_held, 2) <= 22  # the gradients of all and of a part


def held_on_a_rank(index: int, group: dist.ProcessGroup) -> int:
    del index
    with opened(config_of_wide(1, use="cpu:2", strategy="fsdp"), group) as engine:
        return tenths_held(engine, engine.init())


def test_the_check_of_shards_holds_no_whole_gradient(pool: Pool) -> None:
    """The model is one group, which its own passes gather; a whole gradient would make it 30."""
    assert max(pool.run(2, held_on_a_rank)) <= 27


def kept_on_a_rank(index: int, group: dist.ProcessGroup) -> float:
    """Memory that is held after the check, beyond the shards and moments; as a share of the whole
    weights. Nothing collects reference cycles meanwhile.
    """
    del index
    sharded = {"use": "cpu:2", "strategy": "fsdp"}
    with opened(config_of_wide(1, "Ring", **sharded), group) as engine:
        state = engine.init()
        rows = feed_of(engine).trial_rows(5)
        weights: int = sum(p.numel() * p.itemsize for p in state.model.parameters())
        gc.disable()
        try:
            with LiveBytes() as held:
                look_at_own(state)
                own = held.now
                engine.begin_training(state, rows)
                assert not engine.notes  # compared, and nothing to say
                return float((held.measured() - own) / weights)
        finally:
            gc.enable()


def test_the_check_of_shards_keeps_no_whole_model(pool: Pool) -> None:
    """Memory is free again without a search for reference cycles, which may come much later."""
    assert max(pool.run(2, kept_on_a_rank)) < 0.05


def test_one_microbatch_on_one_device_is_checked_with_fewer_passes() -> None:
    def passes(engine: Any, state: Any) -> int:
        calls: list[Any] = []  # a hook of the model's own would be put back, count and all
        with register_module_forward_pre_hook(lambda module, _: calls.append(module)):
            engine.begin_training(state, feed_of(engine).trial_rows(5))
        return calls.count(state.model)

    assert (with_engine(passes, 1), with_engine(passes, 2)) == (4, 9)


def test_means_beside_a_loss_cost_no_exchange_between_ranks() -> None:
    def exchanges(engine: Any, state: Any) -> int:
        with patch.object(Comm, "all_reduce", autospec=True, side_effect=Comm.all_reduce) as seen:
            engine.begin_training(state, feed_of(engine).trial_rows(5))
        return seen.call_count

    assert with_engine(exchanges, 2) == with_engine(exchanges, 2, "Measured")
