"""A comparison of replicas names the first array that differs, who has other bits, and a remedy."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samecurve.core.planning.machine import Device
from samecurve.core.planning.plan import Plan
from samecurve.core.planning.planner import plan as make_plan
from samecurve.errors import RunError
from samecurve.features.check_replicas.verdict import ReplicaHashes, check_alike
from samecurve.observe.plan_text import banner
from tiny import FACTS, MACHINE, config_of, tiny_values

GPUS = tuple(Device(kind="cuda", index=i, name="H200", memory=1 << 37) for i in range(4))


def planned(layout: str, **train: Any) -> Plan:
    """layout: strategy:devices, or jax-strategy:devices"""
    strategy, _, count = layout.partition(":")
    engine = "jax" if strategy.startswith("jax-") else "torch"
    devices = {"use": f"cpu:{count}", "strategy": strategy.removeprefix("jax-")}
    values: Any = tiny_values(Path("text.txt"), train=train, devices=devices)
    return make_plan(config_of({**values, "engine": engine}), MACHINE, FACTS.having(blocks=2))


def message(hashes: list[list[int]], parts: list[list[int]], layout: str = "ddp:3") -> str:
    """The error of these hashes, [holders][arrays]; '': there is none."""
    names = [f"model/{letter}" for letter in "abcdefgh"[: len(hashes[0])]]
    table = ReplicaHashes(names, np.array(hashes), np.array(parts))
    plan = planned(layout)
    plan = replace(plan, layout=replace(plan.layout, devices=GPUS[: plan.layout.num_devices]))
    try:
        check_alike(table, plan, 40)
    except RunError as error:
        return str(error)
    return ""


def test_what_all_hold_alike_is_passed() -> None:
    assert not message([[5, -7]] * 3, [[0, 0]] * 3)


def test_a_rank_that_differs_from_the_majority_is_named_with_its_device() -> None:
    text = message([[1, 8, 3], [1, 2, 9], [1, 2, 3]], [[0] * 3] * 3)
    first = "after step 40 model/b (and 1 more arrays) is not the same on every rank"
    assert f"{first}: rank 0 has other bits than ranks 1 and 2" in text
    assert "memory of cuda:0 (" in text
    assert "--resume RUN" in text


def test_two_copies_have_no_majority() -> None:
    text = message([[1], [2]], [[0]] * 2, "dp:2")
    assert "model/a is not the same on every device: devices 0 and 1 differ" in text
    assert "cuda:0, cuda:1" in text


def test_shards_are_compared_with_copies_of_the_same_shard() -> None:
    """hsdp: ranks 0 and 2 hold the first half of an array, ranks 1 and 3 the second."""
    parts = [[0, 0], [50, 0], [0, 0], [50, 0]]
    assert not message([[1, 7], [2, 7], [1, 7], [2, 7]], parts, "hsdp:4")
    text = message([[1, 7], [2, 7], [1, 7], [3, 7]], parts, "hsdp:4")
    assert "model/a is not the same on every rank: ranks 1 and 3 differ" in text


def test_what_one_rank_holds_alone_is_equal_to_nothing_else() -> None:
    """fsdp: each number is there once."""
    assert not message([[1], [2], [3]], [[0], [10], [20]], "fsdp:3")


@pytest.mark.parametrize(
    ("layout", "interval", "line"),
    [
        ("ddp:3", 20, "3 copies are compared every 20 steps, and before each evaluation and save"),
        ("dp:2", 20, "2 copies are compared"),
        ("jax-dp:2", 20, "2 copies are compared"),
        ("hsdp:4", 20, "2 copies are compared"),
        ("fsdp:2", 20, "fsdp holds each number once"),
        ("single:1", 0, "not compared: one device has one copy of everything"),
    ],
)
def test_the_plan_says_what_is_compared(layout: str, interval: int, line: str) -> None:
    plan = planned(layout, check_replicas=20)
    assert plan.features.get("check_replicas", 0) == interval
    assert line in "\n".join(banner(plan))
    assert ("check_replicas" in plan.actions_due(40)) == bool(interval)
    assert "replicas" not in "\n".join(banner(planned(layout)))
