"""plan() is pure, keeps the batch whatever the devices, and refuses with the numbers."""

import json
from dataclasses import replace
from typing import Any

import pytest

from lockstep.core.config import Config, load
from lockstep.core.document import Document
from lockstep.core.facts import Facts
from lockstep.core.machine import Device, Machine
from lockstep.core.order import Anchor
from lockstep.core.plan import Plan, plan
from lockstep.errors import UserError
from lockstep.tasks import Tasks

GIB = 1 << 30
GPUS = Machine(tuple(Device("cuda", i, "NVIDIA H100 80GB HBM3", 80 * GIB) for i in range(4)), (), 256 * GIB, 32)
FACTS = Facts(samples=1000, eval_samples=50, tokens_per_sample=512, params=10**8, trainable=10**8, blocks=12, bytes_per_sample=GIB, flops_per_sample=1e12, coupled=(), fingerprint="x")


def config(**sections: Any) -> Config:
    return load(Document({"batch": {"samples": 64}, **sections}), Tasks()).config


def test_it_is_pure_and_survives_its_file() -> None:
    first, second = (plan(config(), GPUS, FACTS) for _ in range(2))
    assert first == second
    assert Plan.from_json(json.loads(json.dumps(first.to_json()))) == first


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_a_global_batch_is_served_exactly_by_any_devices(devices: int) -> None:
    made = plan(config(devices={"use": ",".join(map(str, range(devices)))}), GPUS, FACTS)
    assert made.batch == 64
    assert made.micro * made.rounds * devices >= 64
    assert made.strategy == ("single" if devices == 1 else "ddp")
    assert made.backend == ("none" if devices == 1 else "nccl")


def test_memory_caps_the_micro_batch_not_the_batch() -> None:
    small = Machine(tuple(replace(gpu, memory=16 * GIB) for gpu in GPUS.devices), (), 64 * GIB, 16)
    made = plan(config(), small, FACTS)
    assert (made.batch, made.rounds) == (64, 2)
    assert sum(term.bytes for term in made.memory) <= 0.9 * 16 * GIB
    assert "memory" in made.because["micro"]


def test_per_device_batches_multiply_and_say_so() -> None:
    made = plan(config(batch={"per_device": 4, "accumulate": 2}), GPUS, FACTS)
    assert (made.batch, made.micro, made.rounds) == (32, 4, 2)
    assert "it grows with the devices" in made.because["batch"]


def test_a_first_plan_fixes_the_batch_for_good() -> None:
    first = plan(config(batch={"per_device": 4, "accumulate": 2}), GPUS, FACTS)
    later = plan(config(batch={"per_device": 4, "accumulate": 2}, devices={"use": "0,1"}), GPUS, FACTS, first.fixed)
    assert (later.batch, later.micro, later.rounds, later.fixed) == (32, 4, 4, first.fixed)
    assert "--new-batch" in later.because["batch"]
    anew = plan(config(batch={"per_device": 4}), GPUS, FACTS, replace(first.fixed, batch=None, anchor=Anchor(10, 0, 320)))
    assert anew.batch == 16
    assert anew.order.position(10).first == 320


@pytest.mark.parametrize(("rule", "peak"), [("none", 1e-3), ("linear", 4e-3), ("sqrt", 2e-3)])
def test_learning_rate_scaling(rule: str, peak: float) -> None:
    made = plan(config(optimizer={"lr": 1e-3}, schedule={"scale_lr": rule, "base_batch": 16}), GPUS, FACTS)
    assert made.schedule.peak == pytest.approx(peak)
    assert any("without warm-up" in warning for warning in made.warnings) == (rule != "none")


@pytest.mark.parametrize(("sections", "says"), [
    ({"devices": {"use": "0,9"}}, "GPU 9 does not exist"),
    ({"devices": {"use": "x"}}, "'x'"),
    ({"devices": {"use": "1,1"}}, "twice"),
    ({"devices": {"use": "cpu:0"}}, "0 CPU ranks"),
    ({"devices": {"use": "cpu:2", "sync": "nccl"}}, "nccl needs GPUs"),
    ({"devices": {"use": "0,1", "strategy": "single"}}, "single takes one device"),
    ({"devices": {"strategy": "fsdp"}}, "fsdp is not in this version"),
    ({"engine": "jax"}, "jax is not in this version"),
    ({"batch": {"per_device": 500}}, "don't fit"),
    ({"schedule": {"scale_lr": "linear"}}, "needs the batch"),
    ({"train": {"steps": 0}}, "trains nothing"),
])
def test_refusals_name_what_and_why(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        plan(config(**sections), GPUS, FACTS)
    assert caught.value.remedy


def test_refusals_that_follow_from_the_task() -> None:
    with pytest.raises(UserError, match="BatchNorm"):
        plan(config(), GPUS, replace(FACTS, coupled=("BatchNorm2d",)))
    with pytest.raises(UserError, match=r"need .* on each device"):
        plan(config(), GPUS, replace(FACTS, params=10**11, trainable=10**11))
    with pytest.raises(UserError, match="data has changed"):
        plan(config(), GPUS, replace(FACTS, fingerprint="y"), plan(config(), GPUS, FACTS).fixed)
    with pytest.raises(UserError, match="began with seed 0"):
        plan(config(train={"seed": 1}), GPUS, FACTS, plan(config(), GPUS, FACTS).fixed)
