"""train.exact: auto: chosen from the config and the model alone, so alike on any devices and
machines; for good; and never a reason to refuse a run.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from samecurve.core.config.document import Document
from samecurve.core.config.loading import load
from samecurve.core.config.sections import Config
from samecurve.core.planning.exact_choice import MOST_COST
from samecurve.core.planning.exact_foreseen import foreseen_cost
from samecurve.core.planning.facts import Facts, UserOptimizerFacts
from samecurve.core.planning.fixed import Fixed
from samecurve.core.planning.machine import Device, Machine
from samecurve.core.planning.plan import Plan
from samecurve.core.planning.planner import check_before_facts, plan
from samecurve.errors import UserError
from samecurve.observe.plan_text import banner
from samecurve.tasks import Tasks

GIB = 1 << 30
CPUS = Machine(devices=(), links=(), host_bytes=64 * GIB, cores=16)
GPUS = replace(
    CPUS,
    devices=tuple(
        Device(kind="cuda", index=index, name="NVIDIA H100", memory=80 * GIB) for index in (0, 1)
    ),
)
FACTS = Facts(
    samples=1000,
    eval_samples=50,
    tokens_per_sample=512,
    params=10**7,
    trainable=10**7,
    blocks=4,
    bytes_per_sample=1 << 20,
    flops_per_sample=1e10,
    coupled=(),
    fingerprint="x",
    arrays={f"blocks.{number}": (1000, 100) for number in range(100)},
)
SAME_BITS = "       exact (auto): the same bits on up to 8 devices"


def config(**sections: Any) -> Config:
    devices = {"threads": 1, **sections.pop("devices", {})}
    values = {"batch": {"samples": 64}, **sections, "devices": devices}
    return load(Document(values), Tasks()).config


@pytest.mark.parametrize("use", ["auto", "cpu:2", "cpu:3", "cpu:8"])
@pytest.mark.parametrize("strategy", ["auto", "dp", "fsdp"])
def test_every_layout_chooses_alike(use: str, strategy: str) -> None:
    made = plan(config(devices={"use": use, "strategy": strategy}), CPUS, FACTS)
    assert (made.compute.exact, made.batch.micro_batch_size, made.fixed.exact) == (True, 8, True)
    assert made.compute.threads == 1
    (line,) = (line for line in banner(made) if line.startswith(SAME_BITS))
    idle = "; 11% of a step the devices idle: 8 microbatches in 3 rounds" if use == "cpu:3" else ""
    assert line == SAME_BITS + idle
    shared = config(devices={"use": use, "strategy": strategy, "threads": None})
    for facts in (FACTS, replace(FACTS, bytes_per_sample=None)):  # a user's model: not known
        for cores in (1, 2, 3, 6, 9, 16, 64):
            other = plan(shared, replace(CPUS, cores=cores), facts)
            assert (other.compute.exact, other.batch.micro_batch_size) == (True, 8)
    for asked in (None, 1, 4, 16):  # OMP_NUM_THREADS, as scripts set it to the cores of a rank
        limited = plan(shared, replace(CPUS, threads=asked), FACTS)
        assert (limited.batch.micro_batch_size, limited.compute.threads) == (8, 2)
        is_warned = any("OMP_NUM_THREADS asks for 1, and" in one for one in limited.warnings)
        assert is_warned == (asked == 1)
    assert plan(shared, replace(CPUS, cores=32), FACTS).compute.threads == 4
    assert Plan.from_json(json.loads(json.dumps(made.to_json()))) == made


@pytest.mark.parametrize(
    ("sections", "facts", "says"),
    [
        ({}, {"flops_per_sample": 1e8}, "foreseen to take 2.97 times as long"),
        ({"train": {"exact_devices": 8}}, {"flops_per_sample": 1e9}, "foreseen to take 1.26 times"),
        ({}, {"flops_per_sample": None}, "the work of a sample is not known"),
        (
            {"engine": "jax", "devices": {"threads": None}},
            {},
            "engine jax compiles an exact step for every device",
        ),
        (
            {
                "devices": {
                    "threads": None,
                    "strategy": "fsdp",
                    "use": "cpu:2",
                    "gather": "round",
                },
                "train": {"exact_devices": 16},
            },
            {"flops_per_sample": 1e11},
            "1 of a device's 8 cores would compute: fsdp gathers weights for one microbatch",
        ),
        (
            {"devices": {"threads": None, "memory": "1GiB"}, "train": {"exact_devices": 16}},
            {"bytes_per_sample": 1 << 25, "flops_per_sample": 1e11},
            "of a device's 16 cores would compute: memory holds no more",
        ),
        (
            {
                "batch": {"samples": 64},
                "devices": {
                    "strategy": "fsdp",
                    "use": "cpu:2",
                    "gather": "step",
                    "memory": "600MiB",
                },
            },
            {},
            "devices.gather step: whole weights and gradients",
        ),
        (
            {"devices": {"threads": None}},
            {"packed": ("blocks.0",)},
            "would copy the frozen weights",
        ),
        (
            {"devices": {"threads": None}},
            {"whole_batch": True},
            "one microbatch at a time, on few of its cores: the loss looks at the whole batch",
        ),
        ({"batch": {"per_device": 8}}, {}, "batch.per_device without batch.samples"),
        ({"batch": {"samples": 64, "accumulate": 2}}, {}, "batch.accumulate follows the devices"),
        ({"batch": {"samples": 64, "per_device": 1}}, {}, "foreseen to take 1.25 times as long"),
        ({"train": {"allow_coupled": True}}, {}, "train.allow_coupled"),
        (
            {"train": {"compile": True, "exact_devices": 8}},
            {"flops_per_sample": 4e9},
            "foreseen to take 1.20 times as long",
        ),
        # one layout only, whatever others choose
        ({"devices": {"compress": "bf16", "strategy": "ddp", "use": "cpu:2"}}, {}, "bf16 rounds"),
        (
            {"optimizer": {"name": "adafactor"}, "devices": {"strategy": "fsdp", "use": "cpu:2"}},
            {},
            "under fsdp: adafactor adds up",
        ),
        # on these devices only, and for good
        (
            {"batch": {"samples": 32768}, "train": {"exact_devices": 8}},
            {"bytes_per_sample": 1 << 24},
            "(batch.per_device=2048 makes it fit)",
        ),
        (
            {},
            {
                "user_optimizer": UserOptimizerFacts(
                    name="Own",
                    by="Task.optimizer()",
                    elementwise=False,
                    takes_lr=True,
                    scales=(1.0,),
                    num_states=2,
                )
            },
            "asks for arithmetic that is the same",
        ),
    ],
)
def test_what_stands_in_its_way_is_said_and_nothing_is_refused(
    sections: dict[str, Any], facts: dict[str, Any], says: str
) -> None:
    asked = config(**sections)
    check_before_facts(asked, CPUS, can_measure=False)
    made = plan(asked, CPUS, replace(FACTS, **facts))
    (line,) = (line for line in banner(made) if "(auto)" in line)
    assert line.startswith("       not exact (auto): ")
    assert says in line
    assert line.endswith("; --exact asks for it")
    ordinary = plan(
        asked.with_values(train={"exact": False}), CPUS, replace(FACTS, **facts)
    ).to_json()
    chosen = made.to_json()
    assert chosen["because"].pop("exact_auto")
    assert chosen == ordinary


def test_a_layout_that_is_not_exact_says_what_gives_the_bits_of_the_others() -> None:
    in_rounds = {"strategy": "fsdp", "use": "cpu:2", "gather": "round"}
    smaller = replace(FACTS, flops_per_sample=3e9)  # four microbatches
    capped = config(
        batch={"samples": 64, "per_device": 32}, devices={"compress": "bf16", "use": "cpu:2"}
    )
    said = plan(capped, CPUS, FACTS).reasons["exact_auto"]
    assert said.endswith("; --exact --set batch.per_device=8 asks for it")
    made = plan(config(devices={"threads": None, **in_rounds}), CPUS, smaller)
    assert made.reasons["exact_auto"].endswith("; --exact --set train.exact_devices=4 asks for it")


@pytest.mark.parametrize(
    ("cores", "threads", "lanes"),
    [(1, 1, 1), (3, 1, 4), (7, 1, 8), (8, 1, 8), (9, 2, 8), (12, 2, 8), (16, 2, 8), (256, 32, 8)],
)
def test_microbatches_share_out_the_cores(cores: int, threads: int, lanes: int) -> None:
    """All of them: where threads don't fit the cores, there are more of them than cores."""
    made = plan(config(devices={"threads": None}), replace(CPUS, cores=cores), FACTS)
    assert (made.compute.threads, made.compute.lanes) == (threads, lanes)
    assert made.compute.threads_at_once >= cores
    assert ("on these cores a step is foreseen" in made.reasons["exact_auto"]) == (cores == 256)


@pytest.mark.parametrize(
    ("samples", "cores", "lanes"), [(5, 2, 3), (7, 2, 3), (13, 3, 4), (7, 3, 4), (9, 4, 5)]
)
def test_odd_numbers_of_microbatches_leave_no_core_idle(
    samples: int, cores: int, lanes: int
) -> None:
    asked = config(
        train={"exact": True, "exact_devices": samples},
        batch={"samples": samples},
        devices={"threads": None},
    )
    made = plan(asked, replace(CPUS, cores=cores), FACTS)
    assert (made.compute.lanes, made.batch.num_microbatches) == (lanes, samples)
    assert made.reasons["lanes"] == f"on {cores} of its {cores} cores"


def test_a_host_has_all_its_cores_and_one_process_calls_for_all_devices() -> None:
    hosts = replace(CPUS, hosts=2)
    made = plan(config(devices={"use": "cpu:1", "threads": None}), hosts, FACTS)
    assert made.reasons["lanes"] == "on 8 of its 16 cores: 4 microbatches in 1 round" + (
        " (train.exact_devices)"
    )
    assert "to take 2.00 times as long" in made.reasons["exact_auto"]
    many = replace(CPUS, cores=64)
    small = replace(FACTS, flops_per_sample=1.5e9, params=10**5, trainable=10**5)
    for strategy, is_slow in (("ddp", False), ("dp", True)):
        asked = config(devices={"use": "cpu:2", "strategy": strategy, "threads": None})
        said = plan(asked, many, small).reasons["exact_auto"]
        assert ("on these cores" in said) == is_slow


def test_ranks_without_a_sample_are_planned() -> None:
    convolutions = replace(FACTS, arrays={f"c{number}": (8, 8, 3, 3) for number in range(4)})
    asked = config(
        train={"exact": True},
        batch={"samples": 1},
        devices={"use": "cpu:2", "strategy": "ddp", "threads": None},
    )
    assert plan(asked, CPUS, convolutions).compute.exact


def test_a_rank_computes_side_by_side_what_its_cores_and_memory_allow() -> None:
    """In lanes, unless devices.threads gives a rank its cores; a resume is never refused."""

    def lanes(facts: Facts = FACTS, machine: Machine = CPUS, **devices: Any) -> tuple[int, str]:
        asked = config(train={"exact": True}, devices={"threads": None, **devices})
        made = plan(asked, machine, facts)
        assert made.compute.threads == (devices.get("threads") or max(1, machine.cores // 8))
        return made.compute.lanes, made.reasons.get("lanes", "")

    assert lanes() == (8, "on 16 of its 16 cores")  # two threads in each
    assert lanes(use="cpu:4") == (2, "on 4 of its 4 cores")
    assert lanes(machine=replace(CPUS, cores=8, threads=3)) == (4, "on 3 of its 3 cores")
    assert lanes(use="cpu:3", machine=replace(CPUS, cores=6)) == (3, "on 2 of its 2 cores")
    assert lanes(threads=1) == lanes(threads=4) == (1, "")
    few, why = lanes(replace(FACTS, bytes_per_sample=1 << 24), memory="1500MiB")
    assert 1 < few < 8
    assert why.endswith("memory holds no more microbatches side by side")
    for strategy in ("ddp", "dp", "fsdp"):
        assert lanes(use="cpu:2", strategy=strategy) == (4, "on 8 of its 8 cores")
    assert lanes(use="cpu:4", strategy="hsdp", shards=2) == (2, "on 4 of its 4 cores")
    in_rounds = lanes(use="cpu:2", strategy="fsdp", gather="round")
    assert in_rounds[0] == 1
    assert in_rounds[1].endswith(
        "fsdp gathers weights for one microbatch at a time (devices.gather=step: for several)"
    )
    eight = replace(CPUS, cores=8)
    first = plan(config(devices={"threads": None}), eight, FACTS)
    assert (first.compute.exact, first.compute.lanes) == (True, 8)
    assert first.compute.threads_at_once == 8
    assert sum(term.bytes for term in first.memory if term.name == "lanes") > 7 * 8 << 20
    by_round = {"strategy": "fsdp", "use": "cpu:2", "gather": "round"}
    moved = config(devices={"threads": None, **by_round})
    assert plan(moved, eight, FACTS, first.fixed).compute.exact


@pytest.mark.parametrize("use", ["0", "0,1"])
def test_on_gpus_no_run_is_exact_by_itself_until_a_gpu_has_measured_the_cost(use: str) -> None:
    """Whatever the model's work. What --exact would refuse there is said first."""
    asked = config(devices={"use": use, "threads": None})
    for flops in (1e10, 1e15, None):
        made = plan(asked, GPUS, replace(FACTS, flops_per_sample=flops))
        assert not made.compute.exact
        line = "       not exact (auto): unmeasured on GPUs; --exact asks for it"
        assert line in banner(made)
    coupled = plan(asked, GPUS, replace(FACTS, not_exact="gradients of features are sparse"))
    assert coupled.reasons["exact_auto"].startswith("gradients of features are sparse; ")
    assert plan(asked.with_values(train={"exact": True}), GPUS, FACTS).compute.exact


def test_a_run_on_gpus_keeps_what_an_earlier_version_chose() -> None:
    """auto of earlier versions could be exact on GPUs. Such a run goes on exactly."""
    asked = config(devices={"use": "0", "threads": None})
    first = plan(asked.with_values(train={"exact": True}), GPUS, FACTS)
    for fixed in (first.fixed, plan(config(), CPUS, FACTS).fixed):
        later = plan(asked, GPUS, FACTS, fixed)
        assert (later.compute.exact, later.batch.micro_batch_size) == (True, 8)
        assert "as this run began" in later.reasons["exact_auto"]
    on_cpus = plan(config(), CPUS, FACTS, plan(asked, GPUS, FACTS).fixed)
    assert not on_cpus.compute.exact


def test_a_run_keeps_what_its_first_plan_chose() -> None:
    first = plan(config(), CPUS, FACTS)
    costly = replace(FACTS, flops_per_sample=1e6)
    later = plan(config(devices={"use": "cpu:3", "threads": None}), CPUS, costly, first.fixed)
    assert (later.compute.exact, later.batch.micro_batch_size) == (True, 8)
    ordinary = plan(config(), CPUS, costly)
    assert not plan(config(), CPUS, FACTS, ordinary.fixed).compute.exact
    asked = plan(config(train={"exact": True}), CPUS, FACTS, ordinary.fixed)
    assert asked.compute.exact
    assert "exact_auto" not in asked.reasons
    refused = plan(config(train={"exact": False}), CPUS, FACTS, first.fixed)
    assert not refused.compute.exact


def test_a_run_that_can_be_exact_no_longer_goes_on_without_for_good() -> None:
    first = plan(config(), CPUS, FACTS)
    compressed = config(devices={"compress": "bf16", "strategy": "ddp", "use": "cpu:2"})
    later = plan(compressed, CPUS, FACTS, first.fixed)
    assert not later.compute.exact
    says = "this run was exact until here, and is not from here on: compress bf16 rounds"
    assert any(warning.startswith(says) for warning in later.warnings)
    last = plan(config(), CPUS, FACTS, later.fixed)
    assert not last.compute.exact
    with pytest.raises(UserError, match="compress bf16 rounds"):
        plan(compressed.with_values(train={"exact": True}), CPUS, FACTS, first.fixed)


def test_runs_of_earlier_versions_keep_what_they_were() -> None:
    """They have no `exact` in `fixed`; their plan, and the config in a manifest, say it."""
    for was_exact in (False, True):
        made = plan(config(train={"exact": was_exact}), CPUS, FACTS)
        older = made.to_json()
        del older["fixed"]["exact"]
        assert Plan.from_json(older).fixed.exact == was_exact
        manifest = {"config": {"train.exact": was_exact}, "fixed": older["fixed"]}
        fixed = Fixed.from_manifest(manifest)
        assert plan(config(), CPUS, FACTS, fixed).compute.exact == was_exact


def test_what_a_microbatch_pays_beside_its_arrays() -> None:
    """Operations and convolutions of a loop; and features of a whole batch, computed twice."""
    plain = foreseen_cost(FACTS, 64, 8)
    assert plain is not None
    assert foreseen_cost(replace(FACTS, operations=500), 64, 8) == plain  # five for each array
    assert foreseen_cost(replace(FACTS, operations=5000), 64, 8) == pytest.approx(
        7 * (10 * 100 * 5e6 + 200e7) / (64e10 + 10 * 100 * 5e6 + 200e7)
    )
    convolutions = foreseen_cost(replace(FACTS, operations=500, convolutions=300), 64, 8)
    assert convolutions is not None
    assert convolutions > 7 * 300 * 65e6 / (64e10 + 300 * 65e6 + 1e10)
    whole = foreseen_cost(replace(FACTS, whole_batch=True), 64, 8)
    assert whole == pytest.approx(plain + 1 / 3, rel=0.01)
    assert foreseen_cost(replace(FACTS, whole_batch=True), 64, 64) == 0


def test_smaller_models_are_exact_on_fewer_devices() -> None:
    """The most of 8, 4 and 2 that cost little, unless train.exact_devices says how many."""
    said = {}
    for flops in (1e10, 3e9, 1e9, 4e8):
        made = plan(config(), CPUS, replace(FACTS, flops_per_sample=flops))
        said[flops] = (made.compute.exact, made.batch.num_microbatches)
    assert said == {1e10: (True, 8), 3e9: (True, 4), 1e9: (True, 2), 4e8: (False, 1)}
    asked = config(train={"exact": True})
    assert plan(asked, CPUS, replace(FACTS, flops_per_sample=4e8)).batch.num_microbatches == 8


def test_devices_that_share_a_step() -> None:
    wide = config(batch={"samples": 128}, train={"exact_devices": 16})
    made = plan(wide, CPUS, FACTS)
    assert made.batch.micro_batch_size == 8
    assert "up to 16 devices" in made.reasons["exact_auto"]
    more = config(devices={"use": "cpu:9"})
    said = plan(more, CPUS, FACTS).reasons["exact_auto"]
    assert "9 devices share a step of 8 microbatches" in said
    assert plan(more, CPUS, FACTS, plan(config(), CPUS, FACTS).fixed).compute.exact
    small = plan(config(batch={"samples": 64, "per_device": 32}), CPUS, FACTS)
    assert small.batch.micro_batch_size == 8  # batch.per_device is the most that a device takes


def test_its_cost_is_foreseen_as_it_was_measured() -> None:
    """Where the rule takes a model, the measured pair cost little; larger batches cost less."""
    root = Path(__file__).parents[2] / "benchmarks" / "results"
    pairs = [
        (pair, path.name.startswith("compiled"))
        for path in root.glob("*cost-of-exact-*.json")
        for of in [json.loads(path.read_text())]
        for pair in of["models"].values()
        if pair["foreseen"] is not None  # on a GPU
    ]
    for pair, compiled in pairs:
        arrays = {name: tuple(shape) for name, shape in pair["arrays"].items()}
        counts = {key: pair[key] for key in ("trainable", "flops_per_sample")}
        counts["params"] = pair.get("params", pair["trainable"])
        facts = replace(FACTS, arrays=arrays, **counts)
        samples, micro = pair["samples"], pair["microbatch"]
        foreseen = foreseen_cost(facts, samples, micro, compiled=compiled)
        assert foreseen is not None
        assert foreseen == pytest.approx(pair["foreseen"])
        assert foreseen > MOST_COST or pair["ratio"] < 1 + MOST_COST
        larger = foreseen_cost(facts, 2 * samples, 2 * micro, compiled=compiled)
        assert larger is not None
        assert larger < foreseen
    for is_compiled in (False, True):
        costs = [pair["foreseen"] for pair, compiled in pairs if compiled == is_compiled]
        assert min(costs) < MOST_COST < max(costs)
