"""The sentinel: which microbatch is computed again, how a difference is judged and told."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samecurve.core.planning.facts import Facts
from samecurve.core.planning.machine import Device
from samecurve.core.planning.plan import Plan
from samecurve.core.planning.planner import plan as make_plan
from samecurve.errors import FAULTY_DEVICE, START_AGAIN, RunError, UserError
from samecurve.features.guard import Choice, SentinelRule, choose, is_due
from samecurve.features.guard.verdict import (
    CheckedGradient,
    Finding,
    alike,
    judge,
)
from samecurve.observe.plan_text import banner
from tiny import FACTS, MACHINE, config_of, tiny_values

GPU = Device(kind="cuda", index=0, name="H200", memory=1 << 37)


def planned(layout: str, facts: Facts = FACTS, *, per_device: int = 2, **train: Any) -> Plan:
    """layout: strategy:devices, or jax-strategy:devices"""
    strategy, _, count = layout.partition(":")
    engine = "jax" if strategy.startswith("jax-") else "torch"
    devices = {"use": f"cpu:{count}", "strategy": strategy.removeprefix("jax-")}
    values: Any = tiny_values(Path("text.txt"), train=train, devices=devices)
    values["batch"] = {"samples": 12, "per_device": per_device}
    return make_plan(config_of({**values, "engine": engine}), MACHINE, facts.having(blocks=2))


def on_gpus(plan: Plan, *names: str) -> Plan:
    devices = tuple(replace(GPU, index=index, name=name) for index, name in enumerate(names))
    return replace(plan, layout=replace(plan.layout, devices=devices))


def judged(*times: str, groups: list[list[int]] | None = None) -> Finding | None:
    """times: of each device, a letter for each computation, which stands for its hashes"""
    rows = [[np.array([7, ord(letter)]) for letter in of_device] for of_device in times]
    return judge(rows, groups or [list(range(len(times)))])


@pytest.mark.parametrize(
    ("times", "kind", "suspects", "others"),
    [
        (["a", "a", "a"], None, [], []),
        (["aa", "bb", "aa"], "lasting", [1], [0, 2]),
        (["aa", "bb"], "lasting", [0, 1], []),
        (["aa", "bbb"], "lasting", [0, 1], []),  # a device has one vote, however often it computes
        (["aa", "bbb", "aa"], "lasting", [1], [0, 2]),
        (["aa", "ba", "aa"], "transient", [1], [0, 2]),
        (["aa", "ba"], "transient", [1], [0]),
        (["aaa", "aa", "baa"], "transient", [2], [0, 1]),
        (["aa", "bc", "aa"], "lasting", [1], [0, 2]),  # wrong each time, in another way
        (["ab", "ba", "aa"], "not deterministic", [0, 1], []),
        (["ab", "cd"], "not deterministic", [0, 1], []),
        (["aa"], None, [], []),
        (["aba"], "transient", [0], []),
        (["abc"], "not deterministic", [0], []),
        (["ab"], "not deterministic", [0], []),
    ],
)
def test_a_difference_is_judged(
    times: list[str], kind: str | None, suspects: list[int], others: list[int]
) -> None:
    finding = judged(*times)
    assert (finding and finding.kind) == kind
    if finding:
        assert (finding.suspects, finding.others, finding.arrays) == (suspects, others, [1])


def test_devices_of_other_models_are_not_compared() -> None:
    plan = on_gpus(planned("ddp:4", sentinel=5), "H200", "H100", "H200", "H100")
    assert alike(plan) == [[0, 2], [1, 3]]
    assert judged("a", "b", "a", "b", groups=alike(plan)) is None
    finding = judged("aa", "bb", "aa", "cb", groups=alike(plan))
    assert finding is not None
    assert (finding.kind, finding.suspects) == ("transient", [3])


def test_the_microbatch_follows_from_seed_and_step_alone() -> None:
    """On any devices; and it comes around: no microbatch, device or phase is left out."""
    one, three = planned("single:1", sentinel=1), planned("ddp:3", sentinel=1)
    chosen = [choose(three, step, 6, phases=2) for step in range(200)]
    assert [each.number for each in chosen] == [choose(one, step, 6).number for step in range(200)]
    assert {each.number for each in chosen} == set(range(6))
    assert {each.device for each in chosen} == set(range(3))
    assert {each.phase for each in chosen} == {0, 1}
    assert all(each.device == each.number // 2 for each in chosen)
    other = replace(three, fixed=replace(three.fixed, seed=1))
    assert [choose(other, step, 6) for step in range(200)] != chosen


def test_the_first_step_of_a_start_is_checked() -> None:
    rule = SentinelRule(10, "stop")
    assert [step for step in range(7, 31) if is_due(rule, step, 7)] == [7, 9, 19, 29]


def told(
    finding: Finding, layout: str = "ddp:3", hosts: list[str] | None = None, **train: Any
) -> Any:
    """The error, or the event that is recorded in its place."""
    plan = planned(layout, sentinel=5, **train)
    if not train:
        plan = on_gpus(plan, *["H200"] * plan.layout.num_devices)
    gradient = CheckedGradient(
        plan=plan,
        rule=plan.features["guard"],
        step=9,
        choice=Choice(2, 1),
        count=6,
        ids=[40, 7],
        names=["a.weight", "b.weight", "c.weight"],
        hosts=hosts or (),
    )
    try:
        return gradient.report(finding, [2, 3, 2])
    except RunError as error:
        return error


def test_a_faulty_device_is_named_with_all_that_is_needed_to_find_it() -> None:
    error = told(Finding("lasting", [1], [0, 2], [1, 2]), hosts=["one", "two", "two"])
    assert str(error).startswith(
        "train.sentinel: in step 10 microbatch 3 of 6 (samples 40, 7) was computed again, and the"
        " gradient of b.weight (and of 1 more arrays) differs: lasting: rank 1 (cuda:1 on two)"
        " computed it 3 times, each time with other bits than ranks 0 (cuda:0 on one) and 2"
        " (cuda:2 on two)\n  remedy: suspect rank 1 (cuda:1 on two): leave it out"
    )
    assert "nvidia-smi -q -d ECC" in error.remedy
    assert (error.exit_code, error.again) == (FAULTY_DEVICE, False)


def test_a_single_event_lets_the_run_start_again() -> None:
    error = told(Finding("transient", [1], [0, 2], [0]))
    assert "differs: transient: rank 1 (cuda:1) computed it 3 times, once with other bits" in str(
        error
    )
    assert "If the name changes from time to time, suspect a kernel" in error.remedy
    assert (error.exit_code, error.again) == (START_AGAIN, True)


def test_a_kernel_that_is_not_deterministic_is_told_from_a_device() -> None:
    error = told(Finding("not deterministic", [0, 1], [], [0]))
    assert "no device is suspect" in error.remedy
    assert "--exact takes kernels" in error.remedy
    assert error.exit_code == 1
    exact = told(Finding("not deterministic", [0, 1], [], [0]), exact=True)
    assert "--exact takes" not in exact.remedy


def test_a_warning_has_the_same_words_and_the_facts() -> None:
    event = told(Finding("lasting", [1], [0, 2], [1]), on_sentinel="warn")
    assert (event.kind, event.step) == ("warned", 10)
    assert "lasting: rank 1 computed it 3 times" in event.values["text"]
    assert event.values["sentinel"] == {
        "found": "lasting",
        "microbatch": 2,
        "sample_ids": [40, 7],
        "devices": [1],
        "hosts": [],
        "arrays": ["b.weight"],
    }


def test_the_plan_says_what_is_computed_again_and_its_memory() -> None:
    plan = planned("ddp:3", sentinel=50)
    text = "\n".join(banner(plan))
    assert "one microbatch is computed again on each of 3 devices every 50 steps" in text
    assert plan.features["guard"] == SentinelRule(50, "stop")
    assert [term.bytes for term in plan.memory if term.name == "sentinel"] == [4 * 8]
    assert Plan.from_json(plan.to_json()) == plan
    for layout in ("fsdp:2", "jax-dp:2"):  # where nothing is held beside what a step holds
        assert "sentinel" not in {term.name for term in planned(layout, sentinel=50).memory}
    plain = planned("ddp:3")
    assert "sentinel" not in "\n".join(banner(plain))
    assert "sentinel" not in {term.name for term in plain.memory}


def test_what_has_no_microbatch_of_its_own_is_refused() -> None:
    with pytest.raises(UserError, match="the loss looks at the whole batch"):
        planned("ddp:2", FACTS.having(whole_batch=True), sentinel=5)
    facts = FACTS.having(coupled=("BatchNorm1d",))
    with pytest.raises(UserError, match="synchronised norms look at the whole batch"):
        planned("ddp:2", facts, sentinel=5, norm_sync=True, per_device=6)
