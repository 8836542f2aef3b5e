"""Whether a step gathers sharded weights once: where whole weights and gradients fit beside the
microbatch, which does not become smaller for it.
"""

from dataclasses import replace
from typing import Any

import pytest

from samecurve.core.planning.facts import Facts
from samecurve.core.planning.machine import Device
from samecurve.core.planning.plan import Plan
from samecurve.core.planning.planner import plan
from samecurve.errors import UserError
from tiny import FACTS, MACHINE, config_of

MIB = 1 << 20
# 320 MiB of weights in f32, a fifth of them outside of the four blocks
BLOCK = 2**24
MODEL = FACTS.having(
    params=5 * BLOCK,
    trainable=5 * BLOCK,
    blocks=4,
    block_params=BLOCK,
    bytes_per_sample=16 * MIB,
    samples=1000,
)
ROUNDS = {"samples": 16, "per_device": 2}


def made(facts: Facts = MODEL, **sections: Any) -> Plan:
    """The plan of four rounds on two devices."""
    devices = {"use": "cpu:2", "strategy": "fsdp", **sections.pop("devices", {})}
    train = {"precision": "f32", **sections.pop("train", {})}
    values = {"batch": ROUNDS, "devices": devices, "train": train, **sections}
    config = config_of({"task": "language", **values})
    return plan(config, MACHINE, facts)


def memory(one: Plan) -> dict[str, int]:
    return {term.name: term.bytes for term in one.memory}


@pytest.mark.parametrize("exact", [False, True])
def test_whole_weights_and_gradients_are_taken_where_they_fit(*, exact: bool) -> None:
    once = made(train={"exact": exact})
    by_round = made(train={"exact": exact}, devices={"gather": "round"})
    assert (once.layout.gathers_once, by_round.layout.gathers_once) == (True, False)
    assert "4 rounds" in once.reasons["gather"]
    assert once.batch.micro_batch_size == by_round.batch.micro_batch_size == 2
    assert Plan.from_json(once.to_json()) == once
    held, before = memory(once), memory(by_round)
    assert held["gathered"] == MODEL.params * 4 > before["gathered"]
    assert held["summed"] == MODEL.trainable * 4
    if exact:  # of eight microbatches a device adds up four: one sum waits
        assert held["exact"] == (MODEL.trainable + 2 * BLOCK) * 4
        assert once.batch.microbatches_of(8, 1) == range(4, 8)
        assert by_round.batch.microbatches_of(8, 1) == range(1, 8, 2)
        assert "neighbouring" not in once.reasons["exact"]


def test_a_step_of_one_round_decides_nothing() -> None:
    one = made(batch={"samples": 16}, devices={"gather": "step"})
    assert not one.layout.gathers_once
    assert "gather" not in one.reasons
    assert memory(one) == memory(made(batch={"samples": 16}))


def test_memory_comes_first_for_the_microbatch() -> None:
    """A limit under which the microbatch fills what is there, or nearly."""
    ample = sum(memory(made()).values())
    for share, is_once in ((0.99, False), (1.05, False), (1.2, True)):
        one = made(devices={"memory": int(ample * share)})
        assert one.layout.gathers_once == is_once, share
        assert one.batch.micro_batch_size == 2
    assert "10% are to stay free" in made(devices={"memory": ample}).reasons["gather"]
    filled = made(batch={"samples": 160}, devices={"memory": ample})
    assert filled.batch.accumulation_steps > 1
    assert filled.batch.micro_batch_size > 2
    assert not filled.layout.gathers_once
    with pytest.raises(UserError, match=r"gather step: whole weights and .* need .* on each"):
        made(devices={"memory": ample - 1, "gather": "step"})


def test_what_is_not_known_is_not_taken() -> None:
    """Unless half of the memory is left for it, on CPU ranks of an exact run."""
    unknown = MODEL.having(bytes_per_sample=None)
    assert "activations are not known" in made(unknown).reasons["gather"]
    large = made(unknown, train={"exact": True})
    assert large.reasons["gather"].endswith(" 50% are to stay free")
    small = replace(unknown, params=BLOCK, trainable=BLOCK, block_params=BLOCK // 5)
    exact = made(small, train={"exact": True})
    assert exact.layout.gathers_once
    assert exact.reasons["gather"].endswith(" to use, activations not counted")
    assert not made(small).layout.gathers_once
    assert made(unknown, devices={"gather": "step"}).layout.gathers_once
    tried = made(MODEL.having(largest_tried=2))
    assert "the microbatch was tried" in tried.reasons["gather"]


def test_layouts_without_rounds_of_gathering_say_so() -> None:
    other = made(devices={"strategy": "ddp", "gather": "step"})
    assert any("devices.gather has no effect under ddp" in one for one in other.warnings)
    gpu = Device(kind="cuda", index=0, name="NVIDIA H100 80GB HBM3", memory=80 << 30)
    gpus = replace(MACHINE, devices=(gpu, replace(gpu, index=1)))
    devices = {"strategy": "fsdp", "offload": True, "gather": "step"}
    config = config_of({"batch": ROUNDS, "devices": devices})
    with pytest.raises(UserError, match="whole weights stay on the device"):
        plan(config, gpus, MODEL)
    offloaded = config.with_values(devices={"gather": "auto"})
    assert "devices.offload is to avoid" in plan(offloaded, gpus, MODEL).reasons["gather"]
