"""The plan of devices.offload_frozen: which blocks, what stays on a device, what the host holds,
what the copies cost, what is refused, and when a remedy names it.
"""

from typing import Any

import pytest

from samecurve.core.config.document import Document
from samecurve.core.config.loading import load_document
from samecurve.core.config.sections import Config
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.hardware import on_file
from samecurve.core.planning.machine import Device, Machine
from samecurve.core.planning.plan import Plan
from samecurve.core.planning.planner import plan
from samecurve.diagnose.memory import explain_out_of_memory
from samecurve.errors import UserError
from samecurve.features.offload_frozen.host_blocks import host_blocks, offloaded_blocks
from samecurve.observe.plan_text import banner
from samecurve.run.preconditions import check_before_facts
from samecurve.tasks import Tasks
from samecurve_products.lab.simulation.cluster import read_cluster
from samecurve_products.lab.simulation.forecast import compare_strategies, plan_on_cluster
from samecurve_products.lab.simulation.step_time import ASSUMED, step_cost

GIB = 1 << 30
BLOCK, PACKED = 1 << 20, 300 << 20  # numbers and packed bytes of a block
OUTSIDE = 1 << 26
FACTS = Facts.of(
    samples=1000,
    eval_samples=0,
    tokens_per_sample=1,
    params=OUTSIDE + 20 * BLOCK,
    trainable=1 << 24,
    blocks=20,
    bytes_per_sample=4 * GIB,
    flops_per_sample=4e13,
    coupled=(),
    fingerprint="x",
    block_params=BLOCK,
    arrays={f"{i}.codes": (PACKED,) for i in range(20)},
    packed=tuple(f"{i}.codes" for i in range(20)),
    frozen_block_params=(BLOCK,) * 20,
    frozen_block_packed=(PACKED,) * 20,
    recompute_bytes={"selective": 2 * GIB, "block": GIB},
)
FOLLOWED = FACTS.having(after_step="T.after_step()")


def machine(
    gpus: int = 1, *, host: int = 64 * GIB, name: str = "NVIDIA GeForce RTX 3090"
) -> Machine:
    devices = tuple(
        Device(kind="cuda", index=index, name=name, memory=24 * GIB) for index in range(gpus)
    )
    return Machine(devices=devices, links=(), host_bytes=host, cores=8)


def config(**sections: Any) -> Config:
    sections["train"] = {"precision": "bf16", "recompute": "block", **sections.get("train", {})}
    return load_document(
        Document({"batch": {"samples": 4, "per_device": 1}, **sections}), Tasks()
    ).config


def planned(
    share: float, where: Machine | None = None, facts: Facts = FACTS, **sections: Any
) -> Plan:
    devices = {"offload_frozen": share, **sections.pop("devices", {})}
    return plan(config(devices=devices, **sections), where or machine(), facts)


def terms(of: Plan) -> dict[str, int]:
    return {term.name: term.bytes for term in of.memory}


@pytest.mark.parametrize(
    ("count", "share", "numbers"),
    [
        (6, 1.0, (0, 1, 2, 3, 4, 5)),
        (6, 0.5, (1, 3, 5)),
        (6, 0.34, (1, 3, 5)),  # at least that share
        (7, 0.3, (2, 4, 6)),
        (5, 0.01, (4,)),
        (5, 0.0, ()),
        (0, 1.0, ()),
    ],
)
def test_blocks_are_spread_evenly(count: int, share: float, numbers: tuple[int, ...]) -> None:
    assert offloaded_blocks(count, share) == numbers


def test_a_device_holds_two_buffers_in_place_of_what_lies_in_host_memory() -> None:
    # all ordinary, as auto makes those with blocks in host memory
    ordinary = {"exact": False}
    here, half, none = (terms(planned(share, train=ordinary)) for share in (1.0, 0.5, 0.0))
    largest = 4 * BLOCK + PACKED
    assert here["buffers"] == half["buffers"] == 2 * largest
    assert "buffers" not in none
    assert none["weights"] - here["weights"] == 20 * BLOCK * 4
    assert none["packed"] - here["packed"] == 20 * PACKED
    assert none["packed"] - half["packed"] == 10 * PACKED
    for same in ("gradients", "optimizer", "activations"):
        assert here[same] == half[same] == none[same]
    moved = host_blocks(FACTS, 0.5, 4)
    assert sum(none.values()) - sum(half.values()) == moved.saves == 8 * largest


def test_the_reason_says_what_is_moved_and_what_it_should_cost() -> None:
    """Two copies of 5.9 GiB for a microbatch; 3 where blocks are copied in parts."""
    here = planned(1.0)
    seconds = 4 * 4e13 / 3 / (71e12 * 0.4)
    assert here.reasons["offload"] == (
        "the frozen weights of 20 of 20 blocks lie in pinned host memory (5.9 GiB); each block is"
        " copied to one of 2 buffers of 304.0 MiB while the block before it computes, 11.9 GiB for"
        f" a microbatch: 531 ms at 24 GB/s (PCIe 4.0 x16), beside {seconds:.2f} s of computation at"
        " 40% of the peak; not measured"
    )
    assert f"       offload: {here.reasons['offload']}" in banner(here)
    assert not here.warnings
    assert (
        "17.8 GiB for a microbatch" in planned(1.0, facts=FACTS.having(blocks=4)).reasons["offload"]
    )
    assert "offload" not in planned(0.0).reasons
    unknown = planned(1.0, machine(name="some card")).reasons["offload"]
    assert "at 12 GB/s (PCIe 3.0 x16), beside a computation whose time is not known" in unknown
    assert Plan.from_json(here.to_json()).features["offload_frozen"] == 1.0


def test_every_device_on_file_has_its_link_to_the_host() -> None:
    _, devices = on_file()
    assert {device.host.medium for device in devices} == {"pcie"}
    assert {device.host.bandwidth for device in devices} == {12e9, 24e9, 48e9}


def test_the_host_s_memory_is_counted_for_each_of_its_ranks() -> None:
    """4 ranks of 5.9 GiB each; the threads of dp share one copy."""
    assert "(5.9 GiB for each of 4 ranks of a host)" in planned(1.0, machine(4)).reasons["offload"]
    with pytest.raises(UserError, match=r"5\.9 GiB of frozen weights for each of 4 ranks") as found:
        planned(1.0, machine(4, host=16 * GIB))
    assert found.value.remedy.startswith("--set devices.offload_frozen=0.6; or --strategy dp, one")
    assert planned(0.6, machine(4, host=16 * GIB)).layout.strategy == "ddp"
    planned(1.0, machine(4, host=16 * GIB), devices={"strategy": "dp"})
    with pytest.raises(UserError, match=r"a host has 4\.0 GiB"):
        planned(1.0, machine(1, host=4 * GIB))


def test_what_saves_nothing_is_said() -> None:
    assert "saves nothing: 2 buffers of 304.0 MiB for the 608.0 MiB" in planned(0.1).warnings[0]
    on_cpu = planned(1.0, devices={"use": "cpu:1"})
    assert "CPU ranks, whose own memory is the host's" in on_cpu.warnings[0]
    assert terms(on_cpu)["packed"] == 20 * PACKED


@pytest.mark.parametrize(
    ("sections", "facts", "says", "remedy"),
    [
        (
            {"devices": {"strategy": "fsdp"}},
            FACTS,
            "fsdp shares the frozen",
            "devices.offload=true",
        ),
        (
            {"devices": {"strategy": "hsdp"}},
            FACTS,
            "hsdp shares the frozen",
            "devices.offload=true",
        ),
        ({"engine": "jax"}, FACTS, "is for engine torch", "--engine torch"),
        (
            {"train": {"compile": True}},
            FACTS,
            "with train.compile is not built",
            "leave train.comp",
        ),
        (
            {},
            FOLLOWED,
            "may change frozen",
            "leave it out",
        ),
        (
            {},
            FACTS.having(frozen_block_params=(), frozen_block_packed=(), trainable=FACTS.params),
            "nothing is frozen",
            "model.adapter",
        ),
        (
            {},
            FACTS.having(frozen_block_params=(), frozen_block_packed=()),
            "no repeated block that has frozen weights",
            "model.adapter",
        ),
    ],
)
def test_where_it_can_not_be_it_is_refused(
    sections: dict[str, Any], facts: Facts, says: str, remedy: str
) -> None:
    with pytest.raises(UserError, match=says) as found:
        planned(0.5, machine(4), facts, **sections)
    assert found.value.where == "devices.offload_frozen"
    assert remedy in found.value.remedy
    if facts is FACTS:  # what needs no look at the model is refused before it
        devices = {"offload_frozen": 0.5, **sections.pop("devices", {})}
        with pytest.raises(UserError, match=says):
            check_before_facts(config(devices=devices, **sections), machine(4), can_measure=False)


def test_a_remedy_names_it_where_it_helps() -> None:
    """The smallest share that fits; with blocks that run again where no share alone does."""
    for gibibytes, says in (
        (5, "devices.offload_frozen=0.75 keeps frozen weights in host memory"),
        (6, "devices.offload_frozen=0.5 keeps"),
    ):
        with pytest.raises(UserError, match="need") as found:
            planned(0.0, devices={"memory": f"{gibibytes}GiB"})
        assert says in found.value.remedy
    with pytest.raises(UserError, match="need") as found:
        planned(0.0, devices={"memory": "4GiB"}, train={"recompute": "none"})
    both = "--set devices.offload_frozen=1 --set train.recompute=selective keeps frozen weights"
    assert both in found.value.remedy
    with pytest.raises(UserError, match="need") as found:
        planned(0.5, machine(4), devices={"memory": "5GiB", "strategy": "ddp"})
    assert found.value.remedy.startswith("--strategy fsdp --set devices.offload_frozen=0 shares")
    for otherwise in ({"train": {"compile": True}}, {"engine": "jax"}):
        with pytest.raises(UserError, match="need") as found:
            planned(0.0, devices={"memory": "5GiB"}, **otherwise)
        assert "offload_frozen" not in found.value.remedy
    with pytest.raises(UserError, match="need") as found:
        plan(config(devices={"use": "cpu:1", "memory": "5GiB"}), machine(), FACTS)
    assert "offload_frozen" not in found.value.remedy


def test_a_run_that_runs_out_of_memory_names_what_is_left_to_move() -> None:
    for share, is_named in ((0.5, True), (1.0, False), (0.0, False)):
        here = planned(share, machine(2), devices={"strategy": "ddp"})
        error = explain_out_of_memory(MemoryError("out"), here, rank=0, peak_bytes=GIB)
        assert error is not None
        assert ("--set devices.offload_frozen=1 keeps all" in error.remedy) == is_named
        assert ("--strategy fsdp" in error.remedy) == (not share)


def test_an_adapter_s_remedy_has_it_where_the_adapter_alone_does_not_fit() -> None:
    trained = FACTS.having(
        params=20 * 10**8,
        trainable=20 * 10**8,
        block_params=10**8,
        packed=(),
        frozen_block_params=(),
        frozen_block_packed=(),
        adapters={"model.adapter.rank=16": 1 << 24},
    )
    with pytest.raises(UserError, match="need") as found:
        planned(0.0, facts=trained, devices={"memory": "6GiB"})
    assert "--set model.adapter.rank=16 --set devices.offload_frozen=" in found.value.remedy


def test_a_machine_that_one_does_not_have_shows_the_time_of_the_copies() -> None:
    """By hand: what the computation of a microbatch does not hide, and the first block."""
    cluster = read_cluster("1xRTX3090")
    rounds, link = 4, 24e9
    for flops, hidden in ((4e13, True), (4e10, False)):
        facts = FACTS.having(flops_per_sample=flops)
        here = config(devices={"offload_frozen": 1.0})
        cost = step_cost(here, plan_on_cluster(here, facts, cluster), facts, cluster, ASSUMED)
        plain = config()
        other = step_cost(plain, plan_on_cluster(plain, facts, cluster), facts, cluster, ASSUMED)
        assert cost is not None
        assert other is not None
        moved = 20 * (4 * BLOCK + PACKED) / link
        forward = flops / 3 / (71e12 * 0.4)
        exposed = (4 * BLOCK + PACKED) / link
        if not hidden:
            exposed += moved - forward + moved - 3 * forward
        assert cost.copies == pytest.approx(rounds * exposed)
        assert cost.seconds == pytest.approx(other.seconds + cost.copies)
        assert "24 GB/s (PCIe 4.0 x16; 12 GB/s of generation 3" in cost.formulas["copies"]
        assert "copies" not in other.formulas
    rows = compare_strategies(here, FACTS, read_cluster("4xRTX3090"), ASSUMED)
    assert {row.name for row in rows if row.plan} == {"ddp"}
    assert all("shares the frozen weights out" in row.refused for row in rows if not row.plan)
