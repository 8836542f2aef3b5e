"""A task's own optimizer: one curve under every layout and through every checkpoint, or refused
with what it does.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from one_curve import check_one_curve
from samecurve.core.config.document import Document
from samecurve.core.config.loading import load_document
from samecurve.core.config.sections import Config
from samecurve.core.events import REQUESTS
from samecurve.core.planning.planner import plan
from samecurve.core.protocols import ArrayShard
from samecurve.data.feed import Feed
from samecurve.errors import UserError
from samecurve.tasks import Tasks, open_task
from samecurve.torch_engine.engine import TorchEngine
from samecurve.torch_engine.model.model_setup import cast_weights
from samecurve.torch_engine.process_group import Comm
from tiny import MACHINE
from worlds import Pool

HERE = Path(__file__).parent
ASKED = [0] * len(REQUESTS)


def config_of(kind: str, task: str = "Brings", **sections: Any) -> Config:
    values = {
        "task": f"{HERE}/optimizers.py:{task}",
        "model": {"kind": kind},
        "batch": {"samples": 10},
        "optimizer": {"lr": 1e-2},
        "devices": {"use": "cpu"},
        **sections,
    }
    values["train"] = {"steps": 8, "precision": "f64", **sections.get("train", {})}
    return load_document(Document(values), Tasks()).config


def opened(config: Config) -> tuple[TorchEngine, Feed]:
    """An engine on one device of this process, and what feeds it."""
    task = open_task(config, "")
    made = plan(config, MACHINE, task.facts())
    engine = TorchEngine(task, made, config.optimizer, Comm(), [torch.device("cpu")])
    return engine, Feed(
        made, made.layout.devices_of(0), task.train_data(), None, engine.stage, prefetch=0
    )


@pytest.mark.parametrize(
    ("kind", "task", "layouts"),
    [
        ("RAdam", "Elementwise", ["fsdp:2..single..ddp:2"]),
        ("NAdam", "Brings", ["ddp:2..single"]),
        *(
            pytest.param(*one, marks=pytest.mark.long)
            for one in (
                ("Adagrad", "Elementwise", ["dp:2..fsdp:2"]),
                ("Signs", "Elementwise", ["fsdp:2..single"]),
                ("Groups", "Brings", ["ddp:2..single"]),
                ("Adam fused", "Elementwise", ["dp:2..fsdp:2"]),
            )
        ),
    ],
)
def test_a_tasks_own_optimizer_is_one_curve(
    kind: str, task: str, layouts: list[str], pool: Pool, tmp_path: Path
) -> None:
    """Against one device, unbroken: losses, norms, weights and the optimizer's state, in tensors,
    in single ones and in plain numbers; a complex layer is among the weights.
    """
    config = config_of(
        kind,
        task,
        optimizer=(
            {"lr": 1e-2, "groups": [{"match": "layers.1.*", "freeze": True}]}
            if kind == "RAdam"
            else {"lr": 1e-2}
        ),
    )
    check_one_curve(config, layouts, pool, tmp_path, steps=4, near=1e-12)


def test_it_is_driven_by_the_schedule() -> None:
    """As a plain loop with its own optimizer, whose groups' rates follow the config's."""
    engine, feed = opened(
        config_of("Groups", optimizer={"lr": 1e-2, "clip": 0}, schedule={"warmup": 3})
    )
    state = engine.init()
    model = cast_weights(engine.task.model(), "f64")
    model.load_state_dict(
        {name: tensor.clone() for name, tensor in state.model.state_dict().items()}
    )
    biases, rest = (
        [parameter for name, parameter in model.named_parameters() if name.endswith("bias") == bias]
        for bias in (True, False)
    )
    optimizer = torch.optim.RAdam([{"params": [*rest]}, {"params": [*biases]}], lr=1.0)
    for step, batch in feed:
        rows = {
            name: torch.cat([micro.arrays[name] for round_ in batch.rounds for micro in round_])
            for name in ("x", "y", "real")
        }
        mean = engine.task.loss(model, rows)
        optimizer.zero_grad()
        torch.autograd.backward(mean.sum / mean.weight)
        for group, scale in zip(optimizer.param_groups, (1, 0.1), strict=True):
            group["lr"] = engine.plan.lr_at(step) * scale
        optimizer.step()
        state, stats = engine.step(state, batch, engine.plan.lr_at(step), ASKED)
        assert stats.read().loss == pytest.approx(mean.sum.item() / mean.weight, rel=1e-12)


def test_a_step_that_is_not_finite_changes_none_of_its_state() -> None:
    engine, feed = opened(config_of("RAdam"))
    state = engine.init()
    for (step, batch), poison in zip(feed, (1.0, np.inf, np.nan), strict=False):
        before = {piece.name: piece for piece in engine.gather(state)}
        spoilt = [
            tuple(
                micro
                and replace(micro, arrays={**micro.arrays, "real": micro.arrays["real"] * poison})
                for micro in round_
            )
            for round_ in batch.rounds
        ]
        state, stats = engine.step(
            state, replace(batch, rounds=spoilt), engine.plan.lr_at(step), ASKED
        )
        assert stats.read().finite == (poison == 1.0)
        after = {piece.name: piece for piece in engine.gather(state)}
        assert same(before, after) == (poison != 1.0)
    assert {name.split("/")[1] for name in after if name.startswith("optimizer/")} == {
        "exp_avg",
        "exp_avg_sq",
        "step",
    }


def same(before: dict[str, ArrayShard], after: dict[str, ArrayShard]) -> bool:
    return before.keys() == after.keys() and all(
        np.array_equal(before[name].buffer, after[name].buffer) for name in after
    )


def first_step(config: Config) -> None:
    """Through describe and plan."""
    engine, feed = opened(config)
    step, batch = next(iter(feed))
    engine.step(engine.init(), batch, engine.plan.lr_at(step), ASKED)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (config_of("LBFGS"), "LBFGS wants a closure"),
        (config_of("SAM"), "SAM wants a closure"),
        (config_of("Some"), "RAdam was not given scale"),
        (config_of("Others"), "was given more than `params`"),
        (config_of("Copies"), "RAdam was not given scale and 6 more"),
        (config_of("None"), "Brings.optimizer() returns NoneType"),
        (config_of("Raises"), "ValueError: Invalid beta parameter"),
        (
            config_of("Adafactor"),
            (
                "Adafactor keeps 'row_var' of layers.0.weight as a tensor of shape (8, 8, 1), where"
                " it has (8, 8, 2)"
            ),
        ),
        (config_of("SparseAdam"), "RuntimeError: SparseAdam does not support dense gradients"),
        (config_of("Signs list"), "Signs keeps 'all' of scale as list"),
        (config_of("Signs narrow"), "Signs keeps 'low' of scale as torch.bfloat16"),
        (config_of("Signs group"), "Signs changes steps of its parameter groups as it goes"),
        (config_of("Signs noise"), "Signs draws random numbers"),
        (config_of("Signs global"), "Signs keeps state that belongs to no parameter"),
        (
            config_of("RAdam", devices={"use": "cpu:2", "strategy": "fsdp"}),
            "elementwise = True in the task's class",
        ),
        (config_of("RAdam", train={"exact": True}), "elementwise = True in the task's class"),
        (
            config_of(
                "RAdam",
                "Elementwise",
                train={"exact": True},
                devices={"use": "cpu:2", "strategy": "fsdp"},
            ),
            "kernels may round the ends of a part in another way",
        ),
        (
            config_of("RAdam", optimizer={"name": "sgd", "weight_decay": 0.3}),
            "optimizer.name and optimizer.weight_decay do not reach",
        ),
        (
            config_of("RAdam", optimizer={"groups": [{"match": "head*", "lr_scale": 0.5}]}),
            "whose parameter groups are its own",
        ),
        (config_of("", "Fixed"), "optimizer.lr does not reach"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(config: Config, says: str) -> None:
    with pytest.raises(UserError) as refused:
        first_step(config)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "states"), [("RAdam", 2), ("Adam fused", 2), ("Rprop", 2), ("SGD", 0)]
)
def test_what_it_keeps_is_known_before_a_run(kind: str, states: int) -> None:
    """From parameters without values, or with some where it wants them."""
    facts = open_task(config_of(kind), "").facts()
    assert facts.updates.user_optimizer is not None
    assert facts.updates.user_optimizer.num_states == states


def test_the_plan_says_whose_optimizer_it_is() -> None:
    config = config_of("", "Fixed", optimizer={})
    facts = open_task(config, "").facts()
    assert facts.updates.user_optimizer is not None
    assert (facts.updates.user_optimizer.num_states, facts.updates.user_optimizer.scales) == (
        2,
        (2e-2 / 3e-4,),
    )
    assert (
        "RAdam of Fixed.optimizer(): learning rate its own, 66.6667 times"
        in plan(config, MACHINE, facts).reasons["optimizer"]
    )
