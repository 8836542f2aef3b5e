"""What `plan --machine` predicts: words and files for machines, bounds that no time may cross,
plan()'s own arithmetic, and bytes and seconds by hand.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from samecurve.core.config.document import Document
from samecurve.core.config.loading import load_document
from samecurve.core.config.sections import Config
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.hardware import device_spec, on_file, peak
from samecurve.core.planning.planner import plan
from samecurve.errors import SamecurveError, UserError
from samecurve.tasks import Tasks
from samecurve_products.lab.simulation.cluster import read_cluster
from samecurve_products.lab.simulation.collectives import group, padded, seconds, traffic
from samecurve_products.lab.simulation.forecast import (
    check_predictable,
    compare_strategies,
    plan_on_cluster,
    scaling_curves,
)
from samecurve_products.lab.simulation.step_time import ASSUMED, Utilization, step_cost

GIB = 1 << 30
BLOCK, OUTSIDE = 4096 * 4096, 32768 * 4096
ARRAYS = {"embed": (32768, 4096), **{f"layers.{i}.weight": (4096, 4096) for i in range(16)}}
PARAMS = OUTSIDE + 16 * BLOCK
FACTS = Facts.of(
    samples=1 << 20,
    eval_samples=0,
    tokens_per_sample=1024,
    params=PARAMS,
    trainable=PARAMS,
    blocks=16,
    bytes_per_sample=GIB,
    flops_per_sample=6.0 * PARAMS * 1024,
    coupled=(),
    fingerprint="x",
    block_params=BLOCK,
    recompute_bytes={"block": GIB // 8, "selective": GIB // 2},
    arrays=ARRAYS,
    block_arrays=tuple(list(ARRAYS)[1:]),
    rounded=tuple(list(ARRAYS)[1:]),
)


def config(**sections: Any) -> Config:
    return load_document(
        Document({"batch": {"samples": 512}, "train": {"precision": "bf16"}, **sections}), Tasks()
    ).config


@pytest.mark.parametrize(
    ("words", "hosts", "each", "name"),
    [
        ("8xH100", 1, 8, "H100"),
        ("4x8xH200", 4, 8, "H200"),
        ("2xRTX4090", 1, 2, "RTX 4090"),
        ("8xMI300X", 1, 8, "MI300X"),
        ("h100-pcie", 1, 1, "H100 PCIe"),
        ("2x4090", 1, 2, "RTX 4090"),
        ("16 x A100 40GB", 1, 16, "A100 40GB"),
    ],
)
def test_words_name_a_machine(words: str, hosts: int, each: int, name: str) -> None:
    setup = read_cluster(words)
    assert (setup.hosts, setup.devices_per_host, setup.device.name) == (hosts, each, name)
    assert (len(setup.machine.devices), setup.machine.hosts, setup.machine.devices[0].memory) == (
        each,
        hosts,
        setup.device.memory,
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("8xH10", "did you mean H100?"),
        ("8x", "names no machine"),
        ("0xH100", "0 devices"),
        ("nowhere.json", "no file"),
        ("H100x8", "did you mean H100?"),
    ],
)
def test_other_words_are_refused_with_what_is_right(words: str, said: str) -> None:
    with pytest.raises(UserError, match=said.replace("?", r"\?")):
        read_cluster(words)


def test_a_file_describes_any_other_machine_and_its_errors_have_places(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    device = {"name": "X9", "memory": "96GB", "tflops": {"bf16": 800}, "bandwidth": "2.4 TB/s"}
    value: dict[str, Any] = {
        "device": device,
        "devices_per_host": 4,
        "hosts": 2,
        "inside": {"name": "bus", "bandwidth": "100 GB/s"},
        "between": "InfiniBand NDR 400 Gb/s",
    }
    path.write_text(json.dumps(value))
    setup = read_cluster(str(path))
    assert (
        setup.num_devices,
        setup.device.peaks,
        setup.inside.bandwidth,
        setup.between.bandwidth,
    ) == (
        8,
        {"bf16": 800e12},
        100e9,
        48e9,
    )
    cases: list[tuple[dict[str, Any], str]] = [
        ({"hosts": 0}, "m.json:1:.*hosts: should be greater than 0"),
        ({"device": "H101"}, "m.json:1:.*'H101' is not a device on file"),
        ({"between": 5}, "between: should be a name or a section"),
        ({"inside": None}, "needs `inside`"),
        ({"links": 1}, "links: unknown key"),
        ({"inside": {"name": "x", "bandwidth": "quick"}}, "inside.bandwidth: must be"),
    ]
    for wrong, said in cases:
        path.write_text(json.dumps({**value, **wrong}))
        with pytest.raises(SamecurveError) as found:
            read_cluster(str(path))
        assert re.search(said, str(found.value)), str(found.value)


@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H200", "f32", 67),
        ("NVIDIA H200", "f64", 67),  # by its tensor cores, as cuBLAS computes it
        ("NVIDIA H100 80GB HBM3", "f64", 67),
        ("NVIDIA GH200 480GB", "bf16", 989),
        ("NVIDIA A100-SXM4-40GB", "bf16", 312),
        ("Tesla V100-SXM2-32GB", "f16", 125),
        ("NVIDIA GeForce RTX 4090", "bf16", 165),
        ("NVIDIA GeForce RTX 3070", "bf16", 40.6),
        ("NVIDIA GeForce RTX 3070 Ti", "bf16", None),
        ("NVIDIA GeForce RTX 4080 Laptop GPU", "bf16", None),
        ("AMD Instinct MI300X (gfx942)", "bf16", 1307),
        ("AMD gfx942", "bf16", 1307),
        ("AMD Instinct MI300A (gfx942)", "bf16", None),
        ("NVIDIA A10G", "bf16", None),
        ("AMD EPYC", "f32", None),
    ],
)
def test_one_table_serves_the_names_of_drivers_and_those_of_users(
    name: str, precision: str, tflops: float | None
) -> None:
    assert peak(name, precision) == (tflops and tflops * 1e12)
    assert all(
        peak(card.name, "f32") == card.peaks["f32"] and device_spec(card.name, "") is card
        for card in on_file()[1]
    )


def test_no_collective_beats_the_bytes_that_must_pass_or_gets_faster_with_more() -> None:
    for words in ("2xRTX4090", "8xH100", "4x8xH100", "128x8xA100"):
        over = group(read_cluster(words), read_cluster(words).num_devices, 1)
        for kind, factor in (("all-reduce", 2), ("all-gather", 1), ("reduce-scatter", 1)):
            times = [seconds(kind, float(1 << size), over) for size in range(10, 34, 2)]  # type: ignore[arg-type]
            assert times == sorted(times)
            assert all(
                found >= factor * (over.members - 1) / over.members * (1 << size) / over.bandwidth
                for size, found in zip(range(10, 34, 2), times, strict=True)
            )
    apart, together = group(read_cluster("4x8xH100"), 4, 8), group(read_cluster("4x8xH100"), 8, 1)
    assert (apart.hosts, apart.bandwidth, together.hosts, together.bandwidth) == (
        4,
        48e9,
        1,
        18 * 20.6e9,
    )  # each of the eight groups of copies has one adapter a host


def test_bytes_by_hand() -> None:
    setup = read_cluster("8xH100")
    by = {}
    for name in ("ddp", "fsdp", "hsdp"):
        made = plan_on_cluster(config(devices={"strategy": name}), FACTS, setup)
        by[name] = traffic(made, FACTS, setup)
    scalars = 2 * 7 / 8 * 8 * (6 + 3 * 8)  # of 16 blocks fsdp does not gather the last one twice
    assert by["ddp"].sent == pytest.approx(2 * 7 / 8 * PARAMS * 4 + scalars)
    assert by["fsdp"].sent == pytest.approx(
        7 / 8 * ((2 * 16 - 1) * BLOCK * 2 + OUTSIDE * 4 + PARAMS * 4) + scalars + 2 * 7 / 8 * 8
    )
    assert by["hsdp"].sent == pytest.approx(
        3 / 4 * ((2 * 16 - 1) * BLOCK * 2 + OUTSIDE * 4 + PARAMS * 4)
        + 2 * 1 / 2 * PARAMS * 4 / 4
        + scalars
        + 2 * 3 / 4 * 8
    )
    assert padded((30, 7), 64) == 64 * 7


def test_a_step_by_hand_and_what_hides() -> None:
    """One device computes and updates; the same step on eight exposes no more than it sends, and a
    faster device exposes more of it.
    """
    alone, eight, half = read_cluster("H100"), read_cluster("8xH100"), Utilization(0.5, "")
    wanted = config(batch={"per_device": 2})
    one = step_cost(wanted, plan_on_cluster(wanted, FACTS, alone), FACTS, alone, half)
    assert one is not None
    assert one.seconds == pytest.approx(
        2 * 6 * PARAMS * 1024 / (989e12 * 0.5) + 10 * 4 * PARAMS / 3.35e12
    )
    assert one.efficiency == pytest.approx(1.0)
    exposed = []
    for name in ("ddp", "fsdp", "hsdp"):
        there = config(batch={"per_device": 2}, devices={"strategy": name})
        made = plan_on_cluster(there, FACTS, eight)
        slow, fast = (
            step_cost(there, made, FACTS, eight, Utilization(share, "")) for share in (0.2, 1.0)
        )
        assert slow is not None
        assert fast is not None
        assert 0 < slow.exposed <= fast.exposed <= fast.traffic.seconds
        assert slow.efficiency > fast.efficiency
        exposed.append(fast.exposed)
    assert len(set(exposed)) == 3


def test_the_plan_is_the_one_that_train_would_make_there() -> None:
    setup = read_cluster("4x8xH200")
    there, here = plan_on_cluster(config(), FACTS, setup), plan(config(), setup.machine, FACTS)
    assert replace(there, flops=here.flops) == here
    found = {
        (row.name, row.recompute): row
        for row in compare_strategies(config(), FACTS, setup, ASSUMED)
    }
    assert len(found) == 9
    assert all(
        row.plan is not None
        and row.plan.batch.global_batch_size == 512
        and row.plan.layout.num_devices == 32
        for row in found.values()
    )
    none, again = found["fsdp", "none"], found["fsdp", "block"]
    assert none.cost is not None
    assert again.cost is not None
    assert again.cost.compute == pytest.approx(none.cost.compute * 4 / 3)
    assert again.held < none.held


def test_what_does_not_fit_is_shown_with_what_does() -> None:
    large = FACTS.having(params=PARAMS * 20, trainable=PARAMS * 20, block_params=BLOCK * 20)
    found = {
        (row.name, row.recompute): row
        for row in compare_strategies(config(), large, read_cluster("8xH100"), ASSUMED)
    }
    assert not found["ddp", "none"].fits
    assert found["ddp", "none"].plan is None
    assert found["fsdp", "none"].fits
    assert found["fsdp", "none"].plan is not None


def test_curves_end_where_a_fixed_batch_has_no_work_and_go_on_where_it_grows() -> None:
    fixed = {
        curve.name: curve
        for curve in scaling_curves(config(), FACTS, read_cluster("8xH100"), ASSUMED)
    }
    grows = {
        curve.name: curve
        for curve in scaling_curves(
            config(batch={"per_device": 2}), FACTS, read_cluster("8xH100"), ASSUMED
        )
    }
    assert list(grows) == ["ddp", "hsdp", "fsdp"]
    assert fixed["ddp"].points[-1][0] == 512
    assert "512 has no work for 1024" in fixed["ddp"].ends
    assert [size for size, _ in grows["ddp"].points] == [1 << power for power in range(11)]
    assert grows["ddp"].ends == ""
    assert all(
        0 < value <= 1 + 1e-9
        for curve in (*fixed.values(), *grows.values())
        for _, value in curve.points
    )


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"engine": "jax"}, "jax"),
        ({"train": {"exact": True, "precision": "bf16"}}, "--exact"),
        ({"devices": {"strategy": "dp"}}, "dp"),
        ({"devices": {"balance": [2, 1]}}, "predicts equal devices"),
        ({"devices": {"use": "cpu:2"}}, "cpu:2"),
        ({"train": {"precision": "f64"}}, "no peak of L40S"),
    ],
)
def test_what_is_not_predicted_is_refused_by_name(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_predictable(config(**sections), read_cluster("8xL40S"))
