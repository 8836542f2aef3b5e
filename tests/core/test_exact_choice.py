"""train.exact: auto: chosen from the config and the model alone, so alike on any devices and
machines; for good; and never a reason to refuse a run.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from samecurve.core.config.document import Document
from samecurve.core.config.loading import load_document
from samecurve.core.config.sections import Config
from samecurve.core.planning.exact_auto import least_work
from samecurve.core.planning.facts import Facts, UserOptimizerFacts
from samecurve.core.planning.fixed import Fixed
from samecurve.core.planning.machine import Device, Machine
from samecurve.core.planning.plan import Plan
from samecurve.core.planning.planner import plan
from samecurve.errors import UserError
from samecurve.observe.plan_text import banner
from samecurve.run.preconditions import check_before_facts
from samecurve.tasks import Tasks

GIB = 1 << 30
CPUS = Machine(devices=(), links=(), host_bytes=64 * GIB, cores=16)
GPUS = replace(
    CPUS,
    devices=tuple(
        Device(kind="cuda", index=index, name="NVIDIA H100", memory=80 * GIB) for index in (0, 1)
    ),
)
FACTS = Facts.of(
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
    return load_document(Document(values), Tasks()).config


@pytest.mark.parametrize("use", ["auto", "cpu:2", "cpu:3", "cpu:8"])
@pytest.mark.parametrize("strategy", ["auto", "dp", "fsdp"])
def test_every_layout_chooses_alike(use: str, strategy: str) -> None:
    made = plan(config(devices={"use": use, "strategy": strategy}), CPUS, FACTS)
    assert (made.same_bits, made.batch.micro_batch_size, made.fixed.same_bits) == (True, 8, True)
    assert made.compute.threads == 1
    (line,) = (line for line in banner(made) if line.startswith(SAME_BITS))
    idle = "; 11% of a step the devices idle: 8 microbatches in 3 rounds" if use == "cpu:3" else ""
    assert line == SAME_BITS + idle
    shared = config(devices={"use": use, "strategy": strategy, "threads": None})
    for facts in (FACTS, FACTS.having(bytes_per_sample=None)):  # a user's model: not known
        for cores in (1, 2, 3, 6, 9, 16, 64):
            other = plan(shared, replace(CPUS, cores=cores), facts)
            assert (other.same_bits, other.batch.micro_batch_size) == (True, 8)
    for asked in (None, 1, 4, 16):  # OMP_NUM_THREADS
        limited = plan(shared, replace(CPUS, threads=asked), FACTS)
        assert (limited.batch.micro_batch_size, limited.compute.threads) == (8, asked or 1)
    assert Plan.from_json(json.loads(json.dumps(made.to_json()))) == made


@pytest.mark.parametrize(
    ("sections", "facts", "says"),
    [
        (
            {},
            {"flops_per_sample": 1e8},
            "a microbatch of 32 samples is 3.2GFLOP, and exactness costs little from 37.5GFLOP on",
        ),
        ({"train": {"exact_devices": 8}}, {"flops_per_sample": 1e9}, "of 8 samples is 8GFLOP"),
        ({}, {"whole_batch": True}, "compute the features of each microbatch twice"),
        ({}, {"flops_per_sample": None}, "the work of a sample is not known"),
        (
            {"engine": "jax", "devices": {"threads": None}},
            {},
            "engine jax compiles an exact step for every device",
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
        ({"batch": {"per_device": 8}}, {}, "batch.per_device without batch.samples"),
        ({"batch": {"samples": 64, "accumulate": 2}}, {}, "batch.accumulate follows the devices"),
        ({"batch": {"samples": 64, "per_device": 1}}, {}, "a microbatch of 1 sample is 10GFLOP"),
        ({"train": {"allow_coupled": True}}, {}, "train.allow_coupled"),
        (
            {"train": {"compile": True, "exact_devices": 8}},
            {"flops_per_sample": 4e9},
            "a microbatch of 8 samples is 32GFLOP",
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
    made = plan(asked, CPUS, FACTS.having(**facts))
    (line,) = (line for line in banner(made) if "(auto)" in line)
    assert line.startswith("       not exact (auto): ")
    assert says in line
    assert line.endswith("; --exact asks for it") == _is_served(asked, FACTS.having(**facts))
    ordinary = plan(
        asked.with_values(train={"exact": False}), CPUS, FACTS.having(**facts)
    ).to_json()
    chosen = made.to_json()
    assert chosen["because"].pop("exact_auto")
    assert chosen == ordinary


def _is_served(asked: Config, facts: Facts) -> bool:
    """Whether --exact is not refused."""
    try:
        return plan(asked.with_values(train={"exact": True}), CPUS, facts).same_bits
    except UserError:
        return False


def test_a_layout_that_is_not_exact_says_what_gives_the_bits_of_the_others() -> None:
    capped = config(batch={"samples": 64, "per_device": 32}, devices={"use": "cpu:9"})
    said = plan(capped, CPUS, FACTS).reasons["exact_auto"]
    assert said.endswith("; --exact --set batch.per_device=8 asks for it")
    smaller = FACTS.having(flops_per_sample=3e9)  # four microbatches
    made = plan(config(devices={"use": "cpu:9"}), CPUS, smaller)
    assert made.reasons["exact_auto"].endswith("; --exact --set train.exact_devices=4 asks for it")


def test_a_flag_that_would_be_refused_is_not_named() -> None:
    made = plan(config(devices={"compress": "bf16", "use": "cpu:2"}), CPUS, FACTS)
    assert made.reasons["exact_auto"] == "compress bf16 rounds what each device sends"


@pytest.mark.parametrize(
    ("cores", "ranks", "devices"),
    [
        (1, 1, {}),
        (3, 3, {}),
        (8, 8, {}),
        (256, 8, {}),  # as many as there are microbatches
        (16, 4, {"threads": 4}),
        (16, 1, {"strategy": "dp"}),
        (7, 4, {}),  # seven would have two rounds, too
        (16, 8, {"strategy": "fsdp"}),
        (16, 1, {"strategy": "single"}),
        (16, 1, {"use": "cpu"}),
        (16, 3, {"use": "cpu:3"}),
    ],
)
def test_open_devices_are_a_rank_for_each_core_that_has_a_microbatch(
    cores: int, ranks: int, devices: dict[str, Any]
) -> None:
    machine = replace(CPUS, cores=cores)
    made = plan(config(devices={"threads": None, **devices}), machine, FACTS)
    assert made.same_bits
    assert (made.num_devices, made.compute.threads) == (ranks, devices.get("threads", 1))
    says = "8 devices"
    if ranks == 3:
        says += "; 11% of a step the devices idle: 8 microbatches in 3 rounds"
    if devices.get("use", "auto") != "auto":
        says += "; --devices cpu:8 uses 8 of 16 cores"
    elif ranks < cores and "threads" not in devices:
        says += f"; {ranks} of {cores} cores compute; --no-exact uses all"
    assert made.reasons["exact_auto"].endswith(says)
    resumed = plan(config(devices={"threads": None}), replace(CPUS, cores=2), FACTS, made.fixed)
    assert (resumed.num_devices, resumed.compute.threads) == (
        2 // made.compute.threads or 1,
        made.compute.threads,
    )


def test_memory_holds_fewer_ranks() -> None:
    wide = FACTS.having(bytes_per_sample=1 << 28)  # 2 GiB a microbatch
    made = plan(config(devices={"threads": None}), replace(CPUS, host_bytes=16 * GIB), wide)
    assert made.same_bits
    assert 1 < made.num_devices < 8
    assert "4 CPU ranks, the fewest with 2 rounds a step" in made.reasons["devices"]
    assert made.layout.strategy == "ddp"
    alone = plan(config(devices={"threads": None}), replace(CPUS, host_bytes=4 * GIB), wide)
    assert alone.num_devices == 1
    assert alone.reasons["exact_auto"].endswith("; 1 of 16 cores compute; --no-exact uses all")


def test_other_runs_on_open_devices_have_one_rank_with_all_cores() -> None:
    open_devices = config(devices={"threads": None})
    by_flag = config(devices={"threads": None}, train={"exact": False})
    by_device = config(devices={"threads": None}, batch={"per_device": 8}, train={"exact": True})
    costly = FACTS.having(flops_per_sample=1e6)
    for asked, facts in ((open_devices, costly), (by_flag, FACTS)):
        made = plan(asked, CPUS, facts)
        assert (made.num_devices, made.compute.threads) == (1, 16)
    assert plan(by_device, CPUS, FACTS).num_devices == 1  # its batch follows the devices
    tried = plan(open_devices, CPUS, FACTS.having(largest_tried=256))  # by one rank
    assert (tried.num_devices, tried.same_bits) == (1, True)
    sharded = config(devices={"threads": None, "strategy": "fsdp"}, optimizer={"name": "adafactor"})
    whole = plan(sharded, CPUS, FACTS)  # which adds up shard by shard
    assert (whole.num_devices, whole.same_bits) == (1, True)
    by_hand = config(devices={"threads": None, "use": "cpu"}, train={"exact": True})
    assert "; --devices cpu:8 uses 8 of 16 cores" in plan(by_hand, CPUS, FACTS).reasons["threads"]
    assert plan(open_devices, replace(CPUS, hosts=2, started=2), FACTS).num_devices == 2


def test_ranks_without_a_sample_are_planned() -> None:
    convolutions = FACTS.having(arrays={f"c{number}": (8, 8, 3, 3) for number in range(4)})
    asked = config(
        train={"exact": True},
        batch={"samples": 1},
        devices={"use": "cpu:2", "strategy": "ddp", "threads": None},
    )
    assert plan(asked, CPUS, convolutions).same_bits


@pytest.mark.parametrize("use", ["0", "0,1"])
def test_on_gpus_no_run_is_exact_by_itself_until_a_gpu_has_measured_the_cost(use: str) -> None:
    """Whatever the model's work. What --exact would refuse there is said first."""
    asked = config(devices={"use": use, "threads": None})
    for flops in (1e10, 1e15, None):
        made = plan(asked, GPUS, FACTS.having(flops_per_sample=flops))
        assert not made.same_bits
        line = "       not exact (auto): unmeasured on GPUs; --exact asks for it"
        assert line in banner(made)
    coupled = plan(asked, GPUS, FACTS.having(not_same_bits="gradients of features are sparse"))
    assert coupled.reasons["exact_auto"].startswith("gradients of features are sparse; ")
    assert plan(asked.with_values(train={"exact": True}), GPUS, FACTS).same_bits


def test_a_run_on_gpus_keeps_what_an_earlier_version_chose() -> None:
    """auto of earlier versions could be exact on GPUs. Such a run goes on exactly."""
    asked = config(devices={"use": "0", "threads": None})
    first = plan(asked.with_values(train={"exact": True}), GPUS, FACTS)
    for fixed in (first.fixed, plan(config(), CPUS, FACTS).fixed):
        later = plan(asked, GPUS, FACTS, fixed)
        assert (later.same_bits, later.batch.micro_batch_size) == (True, 8)
        assert "kept from the run's start" in later.reasons["exact_auto"]
    on_cpus = plan(config(), CPUS, FACTS, plan(asked, GPUS, FACTS).fixed)
    assert not on_cpus.same_bits


def test_a_run_keeps_what_its_first_plan_chose() -> None:
    first = plan(config(), CPUS, FACTS)
    costly = FACTS.having(flops_per_sample=1e6)
    later = plan(config(devices={"use": "cpu:3", "threads": None}), CPUS, costly, first.fixed)
    assert (later.same_bits, later.batch.micro_batch_size) == (True, 8)
    ordinary = plan(config(), CPUS, costly)
    assert not plan(config(), CPUS, FACTS, ordinary.fixed).same_bits
    asked = plan(config(train={"exact": True}), CPUS, FACTS, ordinary.fixed)
    assert asked.same_bits
    assert "exact_auto" not in asked.reasons
    refused = plan(config(train={"exact": False}), CPUS, FACTS, first.fixed)
    assert not refused.same_bits


def test_a_run_that_can_be_exact_no_longer_goes_on_without_for_good() -> None:
    first = plan(config(), CPUS, FACTS)
    compressed = config(devices={"compress": "bf16", "strategy": "ddp", "use": "cpu:2"})
    later = plan(compressed, CPUS, FACTS, first.fixed)
    assert not later.same_bits
    says = "this run was exact until here, and is not from here on: compress bf16 rounds"
    assert any(warning.startswith(says) for warning in later.warnings)
    last = plan(config(), CPUS, FACTS, later.fixed)
    assert not last.same_bits
    with pytest.raises(UserError, match="compress bf16 rounds"):
        plan(compressed.with_values(train={"exact": True}), CPUS, FACTS, first.fixed)


def test_runs_of_earlier_versions_keep_what_they_were() -> None:
    """They have no `exact` in `fixed`; their plan, and the config in a manifest, say it."""
    for was_exact in (False, True):
        made = plan(config(train={"exact": was_exact}), CPUS, FACTS)
        older = made.to_json()
        del older["fixed"]["exact"]
        assert Plan.from_json(older).fixed.same_bits == was_exact
        manifest = {"config": {"train.exact": was_exact}, "fixed": older["fixed"]}
        fixed = Fixed.from_manifest(manifest)
        assert plan(config(), CPUS, FACTS, fixed).same_bits == was_exact


def test_the_least_work_of_a_microbatch() -> None:
    """Operations and convolutions of a loop count as those of more layers."""
    plain = least_work(FACTS, compiled=False)
    assert plain == 100 * 75e6 + 10**7 * 3e3
    assert least_work(FACTS.having(operations=500), compiled=False) == plain  # 5 for each array
    assert least_work(FACTS.having(operations=5000), compiled=False) == 1000 * 75e6 + 3e10
    convolutions = FACTS.having(operations=500, convolutions=300)
    assert least_work(convolutions, compiled=False) == plain + 300e9
    assert least_work(FACTS, compiled=True) == 3 * plain


def test_smaller_models_are_exact_on_fewer_devices() -> None:
    """The most of 8, 4 and 2 that cost little, unless train.exact_devices says how many."""
    said = {}
    for flops in (1e10, 3e9, 1.5e9, 4e8):
        made = plan(config(), CPUS, FACTS.having(flops_per_sample=flops))
        said[flops] = (made.same_bits, made.batch.num_microbatches)
    assert said == {1e10: (True, 8), 3e9: (True, 4), 1.5e9: (True, 2), 4e8: (False, 1)}
    asked = config(train={"exact": True})
    assert plan(asked, CPUS, FACTS.having(flops_per_sample=4e8)).batch.num_microbatches == 8


def test_devices_that_share_a_step() -> None:
    wide = config(batch={"samples": 128}, train={"exact_devices": 16})
    made = plan(wide, CPUS, FACTS)
    assert made.batch.micro_batch_size == 8
    assert "up to 16 devices" in made.reasons["exact_auto"]
    more = config(devices={"use": "cpu:9"})
    said = plan(more, CPUS, FACTS).reasons["exact_auto"]
    assert "9 devices share a step of 8 microbatches" in said
    assert plan(more, CPUS, FACTS, plan(config(), CPUS, FACTS).fixed).same_bits
    small = plan(config(batch={"samples": 64, "per_device": 32}), CPUS, FACTS)
    assert small.batch.micro_batch_size == 8  # batch.per_device is the most that a device takes


def test_what_the_rule_takes_cost_little_where_it_was_measured() -> None:
    """Pairs of steps, exact and at once, on a CPU's core (benchmarks/exact_cost.py)."""
    root = Path(__file__).parents[2] / "benchmarks" / "results"
    for name in ("cost-of-exact", "compiled-cost-of-exact"):
        taken = set()
        for path in root.glob(f"{name}-amd-epyc.json"):
            for pair in json.loads(path.read_text())["models"].values():
                arrays = {name: tuple(shape) for name, shape in pair["arrays"].items()}
                facts = FACTS.having(arrays=arrays, trainable=pair["trainable"])
                least = least_work(facts, compiled=name.startswith("compiled"))
                is_taken = pair["flops_per_sample"] * pair["microbatch"] >= least
                assert not is_taken or pair["ratio"] < 1.05
                taken.add(is_taken)
        assert taken == {False, True}
