"""plan() is pure, keeps the batch whatever the devices, and refuses with the numbers."""

import json
from dataclasses import replace
from typing import Any

import pytest

from samecurve.core.config.document import Document
from samecurve.core.config.loading import load_document
from samecurve.core.config.sections import Config
from samecurve.core.determinism.data_order import Anchor
from samecurve.core.planning.facts import Facts, UserOptimizerFacts
from samecurve.core.planning.machine import Device, Machine
from samecurve.core.planning.plan import Plan
from samecurve.core.planning.planner import plan
from samecurve.errors import UserError
from samecurve.observe.plan_text import banner
from samecurve.run.preconditions import check_before_facts
from samecurve.tasks import Tasks

GIB = 1 << 30
GPUS = Machine(
    devices=tuple(
        Device(kind="cuda", index=i, name="NVIDIA H100 80GB HBM3", memory=80 * GIB)
        for i in range(4)
    ),
    links=(),
    host_bytes=256 * GIB,
    cores=32,
)
FACTS = Facts.of(
    samples=1000,
    eval_samples=50,
    tokens_per_sample=512,
    params=10**8,
    trainable=10**8,
    blocks=12,
    bytes_per_sample=GIB,
    flops_per_sample=1e12,
    coupled=(),
    fingerprint="x",
)

NORMED = FACTS.having(coupled=("BatchNorm2d net.1",), bytes_per_sample=1 << 20)


def config(**sections: Any) -> Config:
    return load_document(Document({"batch": {"samples": 64}, **sections}), Tasks()).config


def test_it_is_pure_and_survives_its_file() -> None:
    first, second = (plan(config(), GPUS, FACTS) for _ in range(2))
    assert first == second
    assert Plan.from_json(json.loads(json.dumps(first.to_json()))) == first


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adafactor", "muon", "adamw8bit"])
def test_no_optimizer_is_refused_for_a_model_that_is_not_known_yet(optimizer: str) -> None:
    """A pretended model without parameters had nothing that adamw8bit keeps in eight bits."""
    layout = check_before_facts(config(optimizer={"name": optimizer}), GPUS, can_measure=False)
    assert (layout.strategy, layout.num_devices) == ("ddp", 4)


def test_a_cap_on_what_a_device_takes_is_shown_beside_the_batch() -> None:
    capped = plan(config(batch={"samples": 64, "per_device": 4}), GPUS, FACTS)
    assert capped.batch.global_batch_size == 64
    assert capped.reasons["batch"] == "batch.samples, whatever the devices, at most 4 at once"


@pytest.mark.parametrize(
    ("sections", "schedule", "defaults"),
    [
        (
            {},
            "",
            "clip 1 and a cosine to 10% of the rate are defaults here: --set optimizer.clip=0 --set"
            " schedule.decay=constant for a loop without",
        ),
        (
            {"optimizer": {"clip": 1.0}},
            "",
            "a cosine to 10% of the rate is a default here: --set schedule.decay=constant for a"
            " loop without",
        ),
        (
            {},
            "MyTask.schedule()",
            "clip 1 is a default here: --set optimizer.clip=0 for a loop without",
        ),
        ({"optimizer": {"clip": 0}, "schedule": {"decay": "cosine"}}, "", None),
    ],
)
def test_defaults_that_hold_beside_a_tasks_own_optimizer_are_shown(
    sections: dict[str, Any], schedule: str, defaults: str | None
) -> None:
    own = UserOptimizerFacts(
        name="Adam",
        by="MyTask.optimizer()",
        elementwise=True,
        takes_lr=True,
        scales=(1.0,),
        num_states=2,
    )
    facts = FACTS.having(user_optimizer=own, schedule=schedule)
    shown = plan(config(**sections), GPUS, facts)
    assert shown.reasons.get("defaults") == defaults
    assert (defaults is None) or f"       {defaults}" in banner(shown)


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_a_global_batch_is_served_exactly_by_any_devices(devices: int) -> None:
    made = plan(config(devices={"use": ",".join(map(str, range(devices)))}), GPUS, FACTS)
    assert made.batch.global_batch_size == 64
    assert made.batch.micro_batch_size * made.batch.accumulation_steps * devices >= 64
    assert made.layout.strategy == ("single" if devices == 1 else "ddp")
    assert made.layout.backend == ("none" if devices == 1 else "nccl")


def test_memory_caps_the_micro_batch_not_the_batch() -> None:
    small = Machine(
        devices=tuple(replace(gpu, memory=16 * GIB) for gpu in GPUS.devices),
        links=(),
        host_bytes=64 * GIB,
        cores=16,
    )
    made = plan(config(), small, FACTS)
    assert (made.batch.global_batch_size, made.batch.accumulation_steps) == (64, 2)
    assert sum(term.bytes for term in made.memory) <= 0.9 * 16 * GIB
    assert "memory" in made.reasons["micro"]


def test_per_device_batches_multiply_and_say_so() -> None:
    made = plan(config(batch={"per_device": 4, "accumulate": 2}), GPUS, FACTS)
    assert (
        made.batch.global_batch_size,
        made.batch.micro_batch_size,
        made.batch.accumulation_steps,
    ) == (32, 4, 2)
    assert "it grows with the devices" in made.reasons["batch"]


def test_a_first_plan_fixes_the_batch_for_good() -> None:
    first = plan(config(batch={"per_device": 4, "accumulate": 2}), GPUS, FACTS)
    later = plan(
        config(batch={"per_device": 4, "accumulate": 2}, devices={"use": "0,1"}),
        GPUS,
        FACTS,
        first.fixed,
    )
    assert (
        later.global_batch_size,
        later.micro_batch_size,
        later.accumulation_steps,
        later.fixed,
    ) == (32, 4, 4, first.fixed)
    assert "--new-batch" in later.reasons["batch"]
    anew = plan(
        config(batch={"per_device": 4}),
        GPUS,
        FACTS,
        replace(first.fixed, global_batch_size=None, anchor=Anchor(10, 0, 320)),
    )
    assert anew.global_batch_size == 16
    assert anew.order.position(10).first == 320


@pytest.mark.parametrize(
    ("use", "engine", "count", "says"),
    [
        ("auto", "jax", 8, ""),
        ("cpu:8", "jax", 8, ""),
        ("cpu:2", "jax", 2, "asks for 8 CPU devices, and devices cpu:2 for 2: 2 are used"),
        ("cpu", "jax", 1, "asks for 8 CPU devices, and devices cpu for 1"),
        ("auto", "torch", 1, ""),
    ],
)
def test_the_cpu_devices_of_xla_flags_are_taken_or_said(
    use: str, engine: str, count: int, says: str
) -> None:
    machine = Machine(devices=(), links=(), host_bytes=64 * GIB, cores=4, xla_devices=8)
    small = FACTS.having(params=10**6, trainable=10**6, bytes_per_sample=1 << 20)
    made = plan(config(engine=engine, devices={"use": use}), machine, small)
    assert made.layout.num_devices == count
    assert ("XLA_FLAGS asks for 8" in made.reasons["devices"]) == (use == "auto" and count == 8)
    assert any(says in warning for warning in made.warnings) == bool(says)


@pytest.mark.parametrize(("rule", "peak"), [("none", 1e-3), ("linear", 4e-3), ("sqrt", 2e-3)])
def test_learning_rate_scaling(rule: str, peak: float) -> None:
    made = plan(
        config(optimizer={"lr": 1e-3}, schedule={"scale_lr": rule, "base_batch": 16}), GPUS, FACTS
    )
    assert made.schedule.peak == pytest.approx(peak)
    assert any("without warm-up" in warning for warning in made.warnings) == (rule != "none")


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"devices": {"use": "0,9"}}, "GPU 9 does not exist"),
        ({"devices": {"use": "x"}}, "'x'"),
        ({"devices": {"use": "1,1"}}, "twice"),
        ({"devices": {"use": "cpu:0"}}, "0 CPU ranks"),
        ({"devices": {"use": "cpu:2", "sync": "nccl"}}, "nccl needs GPUs"),
        ({"devices": {"use": "0,1", "strategy": "single"}}, "single takes one device"),
        ({"devices": {"use": "all", "strategy": "single"}}, "not the 4 of all"),
        ({"devices": {"use": "cpu:3", "strategy": "hsdp"}}, "hsdp needs groups"),
        ({"devices": {"strategy": "hsdp", "shards": 3}}, "groups of 2"),
        ({"devices": {"strategy": "fsdp", "shards": 2}}, "shards is for strategy hsdp"),
        ({"devices": {"strategy": "fsdp", "sync": "cpu"}}, "gloo can't"),
        ({"devices": {"strategy": "ddp", "offload": True}}, "holds the whole model"),
        (
            {"devices": {"use": "cpu:2", "strategy": "fsdp", "offload": True}},
            "in host memory already",
        ),
        (
            {"devices": {"strategy": "ddp", "compress": "bf16"}, "train": {"precision": "f64"}},
            "what f64 is for",
        ),
        ({"devices": {"strategy": "fsdp", "compress": "bf16"}}, "is for strategy ddp, not fsdp"),
        ({"devices": {"strategy": "ddp", "memory": "1GiB"}}, "1.0 GiB to use"),
        ({"engine": "jax", "devices": {"strategy": "ddp"}}, "ddp is for engine torch"),
        ({"engine": "jax", "devices": {"strategy": "hsdp"}}, "hsdp is for engine torch"),
        ({"engine": "jax", "devices": {"compress": "bf16"}}, "compress is for engine torch"),
        ({"engine": "jax", "devices": {"sync": "cpu"}}, "jax reduces between GPUs with NCCL"),
        ({"engine": "jax", "train": {"norm_sync": True}}, "norm_sync is for engine torch"),
        ({"batch": {"per_device": 500}}, "don't fit"),
        ({"schedule": {"scale_lr": "linear"}}, "needs the batch"),
        ({"train": {"steps": 0}}, "trains nothing"),
    ],
)
def test_refusals_name_what_and_why(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        plan(config(**sections), GPUS, FACTS)
    assert caught.value.remedy


def test_refusals_that_follow_from_the_task() -> None:
    with pytest.raises(UserError, match=r"BatchNorm2d net\.1 mixes"):
        plan(config(), GPUS, NORMED)
    with pytest.raises(UserError, match="over 1 device in 4 rounds"):
        plan(
            config(
                batch={"samples": 64, "accumulate": 4},
                devices={"use": "0"},
                train={"norm_sync": True},
            ),
            GPUS,
            NORMED,
        )
    with pytest.raises(UserError, match="contrastive"):
        plan(config(train={"norm_sync": True}), GPUS, NORMED.having(coupled=("contrastive loss",)))
    with pytest.raises(UserError, match="statistics twice"):
        plan(config(train={"norm_sync": True, "recompute": "block"}), GPUS, NORMED)
    with pytest.raises(UserError, match=r"need .* on each device"):
        plan(config(), GPUS, FACTS.having(params=10**11, trainable=10**11))
    wide = FACTS.having(params=1 << 30, trainable=1 << 30, arrays={"w": (1 << 20, 1 << 10)})
    for gibibytes, smaller in ((10, "adafactor"), (12, "adamw8bit")):
        with pytest.raises(UserError, match=f"optimizer.name={smaller} keeps less"):
            plan(config(devices={"use": "0", "memory": gibibytes << 30}), GPUS, wide)
    with pytest.raises(UserError, match="flash computes in bf16 and f16 only"):
        plan(config(), GPUS, FACTS.having(narrow_only="model.attention flash"))
    with pytest.raises(UserError, match="has changed since this run began"):
        plan(config(), GPUS, FACTS.having(fingerprint="y"), plan(config(), GPUS, FACTS).fixed)
    with pytest.raises(UserError, match="began with seed 0"):
        plan(config(train={"seed": 1}), GPUS, FACTS, plan(config(), GPUS, FACTS).fixed)


@pytest.mark.parametrize(
    ("sections", "facts", "says"),
    [
        ({"devices": {"strategy": "fsdp", "offload": True}}, {}, "host's CPU makes the updates"),
        ({"devices": {"compress": "bf16", "strategy": "ddp"}}, {}, "compress bf16 rounds"),
        (
            {"batch": {"samples": 64, "accumulate": 2}},
            {},
            "accumulate cuts a step by the number of devices",
        ),
        ({"batch": {"samples": 640}}, {}, "a microbatch of 80 samples does not fit"),
        (
            {"train": {"exact": True, "allow_coupled": True}},
            {"coupled": ("BatchNorm2d net.1",)},
            "running statistics",
        ),
        ({"devices": {"threads": 2}}, {}, "threads is for CPU ranks"),
    ],
)
def test_exact_refuses_what_follows_the_devices(
    sections: dict[str, Any], facts: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError, match=says) as caught:
        plan(config(**{"train": {"exact": True}, **sections}), GPUS, FACTS.having(**facts))
    assert caught.value.remedy


def test_exact_holds_a_few_shards_of_sums() -> None:
    """Beside the gradient's own shard: sums that wait after a round, what the copies of hsdp
    exchange, a block's gradients of all ranks. On one device sums of whole gradients.
    """
    facts = FACTS.having(params=1000, trainable=1000, blocks=4, block_params=200)
    batch, train = {"samples": 16, "per_device": 1}, {"exact": True, "precision": "f32"}
    held = {}
    for use, strategy in (("cpu:4", "fsdp"), ("cpu:3", "fsdp"), ("cpu:4", "hsdp"), ("cpu:1", "")):
        devices = {"use": use, "strategy": strategy or "auto", "gather": "round"}
        made = plan(config(batch=batch, train=train, devices=devices), GPUS, facts)
        (term,) = (term for term in made.memory if term.name == "exact")
        held[use, strategy] = term.bytes // 4
        assert ("in each round" in made.reasons["exact"]) == bool(strategy)
        assert made.layout.every_rank_every_round == bool(strategy)
    assert held == {
        ("cpu:4", "fsdp"): 1 * 250 + 200,  # the first 12 are two sums
        ("cpu:3", "fsdp"): 2 * 334 + 200,  # the first 7 are three, 13 too
        ("cpu:4", "hsdp"): (1 + 2) * 500 + 200,
        ("cpu:1", ""): 3 * 1000,
    }
    narrow = {"exact": True, "precision": "bf16"}
    devices = {"use": "cpu:4", "strategy": "fsdp", "gather": "round"}
    made = plan(config(batch=batch, train=narrow, devices=devices), GPUS, facts)
    (term,) = (term for term in made.memory if term.name == "copies")
    assert term.bytes == 2 * 200 * 2  # two blocks in f32, beside weights that nothing rounds


def test_exact_sums_under_the_fsdp_of_jax_are_those_of_dp() -> None:
    """Each device computes neighbouring microbatches, and holds sums of whole gradients."""
    held = []
    for strategy in ("dp", "fsdp"):
        devices = {"use": "cpu:4", "strategy": strategy}
        made = plan(config(engine="jax", train={"exact": True}, devices=devices), GPUS, FACTS)
        assert "in each round" not in made.reasons["exact"]
        held += [term for term in made.memory if term.name in {"exact", "copies"}]
    assert len(held) == 2
    assert held[0] == held[1]


def test_exact_cuts_a_batch_alike_on_any_devices_and_for_good() -> None:
    made = {
        world: plan(config(train={"exact": True}, devices={"use": f"cpu:{world}"}), GPUS, FACTS)
        for world in (1, 2, 3, 8)
    }
    assert {
        (found.batch.micro_batch_size, found.compute.threads, found.same_bits)
        for found in made.values()
    } == {(8, 1, True)}
    again = plan(
        config(
            batch={"samples": 64, "per_device": 4},
            train={"exact": True},
            devices={"use": "cpu:2", "threads": 2},
        ),
        GPUS,
        FACTS,
        made[3].fixed,
    )
    assert (
        again.batch.micro_batch_size,
        again.compute.threads,
        again.batch.accumulation_steps,
    ) == (8, 1, 4)
    assert any("began with 1 thread a rank" in warning for warning in again.warnings)
    moved = plan(config(train={"exact": True}, devices={"use": "0"}), GPUS, FACTS, made[3].fixed)
    assert any(
        "its bits are those of torch on NVIDIA H100" in warning for warning in moved.warnings
    )
    mixed = replace(GPUS, devices=(*GPUS.devices[:1], replace(GPUS.devices[1], name="NVIDIA A100")))
    with pytest.raises(UserError, match="compute with different kernels"):
        plan(config(train={"exact": True}), mixed, FACTS)


def test_coupled_models_train_where_their_statistics_are_whole_or_by_consent() -> None:
    assert plan(config(train={"norm_sync": True}), GPUS, NORMED).layout.every_rank_every_round
    assert plan(config(devices={"use": "0"}), GPUS, NORMED).accumulation_steps == 1
    allowed = plan(config(train={"allow_coupled": True}), GPUS, NORMED)
    assert any("results depend on the 4 devices" in warning for warning in allowed.warnings)


def test_auto_takes_ddp_where_the_model_fits_and_fsdp_where_only_a_part_does() -> None:
    """2.5B parameters need 40 GB of state in f32 with AdamW."""
    large = FACTS.having(
        params=25 * 10**8, trainable=25 * 10**8, block_params=10**8, bytes_per_sample=GIB
    )
    small = Machine(
        devices=tuple(replace(gpu, memory=40 * GIB) for gpu in GPUS.devices),
        links=(),
        host_bytes=64 * GIB,
        cores=16,
    )
    assert plan(config(), GPUS, large).layout.strategy == "ddp"
    made = plan(config(), small, large)
    assert (
        made.layout.strategy,
        made.layout.shards,
        made.layout.world_size,
        made.layout.every_rank_every_round,
    ) == (
        "fsdp",
        4,
        4,
        True,
    )
    assert "does not fit on one device" in made.reasons["strategy"]
    with pytest.raises(UserError, match="under ddp") as caught:
        plan(config(devices={"strategy": "ddp"}), small, large)
    assert "--strategy fsdp" in caught.value.remedy
    assert plan(config(devices={"memory": "38GiB"}), GPUS, large).layout.strategy == "fsdp"


def test_dp_is_one_process_whose_first_device_holds_more() -> None:
    made = plan(config(devices={"strategy": "dp"}), GPUS, FACTS)
    assert (
        made.layout.world_size,
        made.layout.num_devices,
        made.layout.backend,
        list(made.layout.devices_of(0)),
    ) == (
        1,
        4,
        "none",
        [0, 1, 2, 3],
    )
    assert any("the first device holds 762.9 MiB more" in warning for warning in made.warnings)


def test_hsdp_repeats_groups_of_shards() -> None:
    made = plan(config(devices={"strategy": "hsdp"}), GPUS, FACTS)
    assert (made.layout.shards, made.layout.num_devices) == (2, 4)
    assert "2 copies of the model" in made.reasons["strategy"]


@pytest.mark.parametrize(
    ("train", "engine", "says"),
    [
        ({"compile": True}, "jax", "jax compiles its step anyway"),
        ({"float8": True}, "torch", "not f32"),
        (
            {"float8": True, "precision": "bf16", "exact": True},
            "torch",
            "train.exact: train.float8 rounds",
        ),
        ({"float8": True, "precision": "bf16"}, "jax", "is for engine torch"),
    ],
)
def test_what_is_fast_is_refused_by_name_where_it_cannot_be(
    train: dict[str, Any], engine: str, says: str
) -> None:
    with pytest.raises(UserError, match=says):
        plan(config(train=train, engine=engine), GPUS, FACTS)


def test_what_is_fast_says_what_it_changes() -> None:
    made = plan(config(train={"float8": True, "precision": "bf16"}), GPUS, FACTS)
    assert "results change" in made.warnings[0]
    assert "slower than bf16" in made.warnings[1]
    assert (
        plan(config(train={"compile": True}), GPUS, FACTS)
        .reasons["compile"]
        .startswith("12 blocks, one program")
    )
    assert not plan(config(train={"compile": True}), GPUS, FACTS).warnings
    exact = plan(config(train={"compile": True, "exact": True}), GPUS, FACTS)
    assert exact.reasons["compile"].endswith("the same programs, which is checked")
    with pytest.raises(UserError, match="CPU ranks have no products in eight bits"):
        plan(
            config(train={"float8": True, "precision": "bf16"}, devices={"use": "cpu"}), GPUS, FACTS
        )


def test_recompute_keeps_less_and_what_fitted_is_obeyed() -> None:
    facts = FACTS.having(recompute_bytes={"block": GIB // 8})
    activations = [
        next(
            term.bytes
            for term in plan(config(train={"recompute": how}), GPUS, facts).memory
            if term.name == "activations"
        )
        for how in ("none", "block")
    ]
    assert activations[0] == 8 * activations[1]
    tried = plan(config(), GPUS, FACTS.having(largest_tried=3))
    assert (tried.micro_batch_size, tried.accumulation_steps) == (3, 6)


def test_what_does_not_fit_is_told_what_would() -> None:
    """Each with what it needs; of 8 bits and of whole activations there is not enough."""
    large = FACTS.having(
        params=4 * 10**9,
        trainable=4 * 10**9,
        arrays={"weight": (10**6, 4000)},
        bytes_per_sample=8 * GIB,
        recompute_bytes={"selective": 4 * GIB, "block": 2 * GIB},
        adapters={"model.adapter.rank=16": 10**7},
    )
    one = {"devices": {"use": "0", "memory": "37GiB"}, "batch": {"samples": 1}}
    with pytest.raises(UserError) as refused:
        plan(config(**one), GPUS, large)
    assert refused.value.remedy == (
        "--set optimizer.name=adafactor --set train.recompute=selective keeps less of each"
        " parameter: another curve (34.6 GiB); or --set model.adapter.rank=16 trains 10M parameters"
        " beside frozen ones (23.8 GiB)"
    )


@pytest.mark.parametrize(
    ("gpu", "train", "precision", "reason"),
    [
        ({}, {"amp": True}, "bf16", "train.amp; --no-amp is f32"),
        ({"capability": "7.0", "name": "Tesla V100"}, {"amp": True}, "f16", "has no bf16"),
        (None, {"amp": True}, "f32", "train.amp: f32 on CPUs"),
        ({}, {"amp": True, "precision": "f64"}, "f64", "train.precision"),
        ({}, {}, "f32", "train.precision"),
    ],
)
def test_amp_follows_the_devices(
    gpu: dict[str, Any] | None, train: dict[str, Any], precision: str, reason: str
) -> None:
    devices = () if gpu is None else tuple(replace(one, **gpu) for one in GPUS.devices)
    use = {"use": "cpu:2"} if gpu is None else {}
    planned = plan(config(train=train, devices=use), replace(GPUS, devices=devices), FACTS)
    assert planned.compute.precision == precision
    assert reason in planned.reasons["precision"]
    wide = plan(config(train={"precision": precision}, devices=use), GPUS, FACTS)
    assert [term.bytes for term in planned.memory] == [term.bytes for term in wide.memory]


def test_amp_is_for_torch() -> None:
    with pytest.raises(UserError, match=r"train\.amp chooses a precision for engine torch"):
        plan(config(engine="jax", train={"amp": True}), GPUS, FACTS)
