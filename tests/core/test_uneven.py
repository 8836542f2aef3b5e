"""Microbatches by the devices' speeds: who gets how many, how large they are, when it isn't worth
it, and what can't be.
"""

import json
from dataclasses import replace
from typing import Any

import pytest
from test_plan import FACTS, GPUS, NORMED, config

from samecurve.core.config.document import Document
from samecurve.core.config.loading import load_document
from samecurve.core.planning.facts import Facts, Speed, Speeds
from samecurve.core.planning.plan import Plan
from samecurve.core.planning.planner import plan
from samecurve.errors import UserError
from samecurve.features.balance import balance_of
from samecurve.features.balance.uneven_split import (
    largest_close_to_best,
    microbatch_seconds,
    predict_step_seconds,
)
from samecurve.observe.plan_text import arithmetic, decisions
from samecurve.tasks import Tasks


def made(
    balance: Any, samples: int = 64, use: str = "0,1", facts: Facts = FACTS, **sections: Any
) -> Plan:
    return plan(
        config(
            **{
                "devices": {"use": use, "balance": balance},
                "batch": {"samples": samples},
                **sections,
            }
        ),
        GPUS,
        facts,
    )


def measured(*devices: tuple[float, float]) -> Facts:
    return FACTS.having(
        speeds=Speeds(
            devices=tuple(Speed(*device) for device in devices), rest=0.01, origin="(measured then)"
        ),
    )


def test_microbatches_are_assigned_by_speeds_given_by_hand() -> None:
    found = made([3, 1])
    assert (
        found.batch.global_batch_size,
        found.batch.micro_batch_size,
        found.batch.accumulation_steps,
        found.batch.microbatches_per_device,
    ) == (64, 16, 3, (3, 1))
    assert found.batch.assignment(64, 0).rounds == ((0, 16), (16, 32), (32, 48))
    assert found.batch.assignment(64, 1).rounds == (None, None, (48, 64))
    assert (
        found.batch.assignment(20, 0).rounds
        == (
            (0, 16),
            (16, 20),
        )
        # an epoch's tail, by the same rule: 2 take the first device 2 thirds of what 1 takes the
        # other
    )
    assert arithmetic(found) == "batch 64 = 3 + 1 microbatches of 16, in 3 rounds"
    assert "0.51 of what they take split evenly" in found.reasons["balance"]
    assert Plan.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert (
        arithmetic(made([2, 1], samples=11))
        == "batch 11 = 2 + 1 microbatches of 4, the last one of 3, in 2 rounds"
    )


def test_without_speeds_nothing_changes() -> None:
    plain = plan(config(devices={"use": "0,1"}), GPUS, FACTS)
    assert made("even") == plain
    assert (plain.batch.microbatch_seconds, "balance" in plain.reasons) == ((), False)


def test_what_a_microbatch_costs_by_itself_keeps_them_large() -> None:
    """The same ratio of speeds: where launching takes nothing, they are as fine as it takes; where
    it takes as long as three samples, few; where it takes all, none is cut.
    """
    free, dear, all_launch = (
        measured((launch, each), (1.7 * launch, 1.7 * each))
        for launch, each in ((0.0, 0.01), (0.03, 0.01), (0.5, 0.0001))
    )
    assert (
        made("measured", facts=free).micro_batch_size
        < made("measured", facts=dear).micro_batch_size
        <= 32
    )
    assert made("measured", facts=all_launch).micro_batch_size == 32
    assert made("measured", facts=all_launch).batch.microbatch_seconds == ()
    for facts in (free, dear):
        assert facts.measured.speeds is not None
        found = made("measured", facts=facts)
        best = min(
            predict_step_seconds(
                facts.measured.speeds, 64, size, microbatch_seconds(facts.measured.speeds, size)
            )
            for size in range(1, 33)
        )
        assert (
            best
            <= predict_step_seconds(
                facts.measured.speeds,
                64,
                found.batch.micro_batch_size,
                found.batch.microbatch_seconds,
            )
            <= 1.03 * best
        )
        shares = found.batch.microbatches_per_device
        shown = f"{' + '.join(map(str, shares))} of {sum(shares)} microbatches"
        assert decisions(found)["balance"] == shown


def test_a_prediction_counts_launches_samples_and_the_rest() -> None:
    speeds = Speeds(devices=(Speed(0.1, 0.01), Speed(0.2, 0.03)), rest=0.5, origin="x")
    assert predict_step_seconds(speeds, 64, 16) == pytest.approx(0.5 + 2 * 0.2 + 32 * 0.03)
    assert predict_step_seconds(speeds, 60, 16, (1.0, 3.0)) == pytest.approx(
        0.5 + max(3 * 0.1 + 48 * 0.01, 0.2 + 12 * 0.03)
    )
    assert largest_close_to_best(Speeds(devices=(Speed(0.0, 1.0), Speed(0.0, 3.0))), 64, 8) == 8


def test_devices_within_the_noise_are_assigned_evenly() -> None:
    found = made("measured", facts=measured((0.0, 0.0100), (0.0, 0.0103)))
    assert (
        found.batch.microbatch_seconds,
        found.batch.microbatches_per_device,
        found.batch.micro_batch_size,
    ) == (
        (),
        (1, 1),
        32,
    )
    assert decisions(found)["balance"] == "even"
    assert found.reasons["balance"].startswith(
        "100 and 97.1 samples/s (measured then); another split is predicted to save less than 5%"
    )
    found = made("measured", facts=measured((0.0, 0.01), (0.0, 0.03)))
    assert (
        found.reasons["balance"]
        == "100 and 33.3 samples/s (measured then); a step is predicted to take 490 ms instead of"
        " 970 ms"
    )


def test_memory_and_per_device_cap_a_microbatch_and_exact_fixes_it() -> None:
    small = replace(GPUS, devices=tuple(replace(gpu, memory=8 << 30) for gpu in GPUS.devices))
    capped = plan(config(devices={"use": "0,1", "balance": [3, 1]}), small, FACTS)
    assert capped.micro_batch_size < made([3, 1]).micro_batch_size
    assert sum(capped.batch.microbatches_per_device) * capped.micro_batch_size >= 64
    assert made([3, 1], batch={"samples": 64, "per_device": 4}).micro_batch_size == 4
    grown = made([3, 1], batch={"per_device": 16, "accumulate": 2})
    assert (
        grown.global_batch_size,
        grown.micro_batch_size,
        grown.batch.microbatches_per_device,
    ) == (
        64,
        16,
        (3, 1),
    )
    exact = made([3, 1], train={"exact": True})
    assert (
        exact.micro_batch_size,
        exact.batch.microbatches_per_device,
        exact.fixed.micro_batch_size,
    ) == (8, (6, 2), 8)


def test_a_resume_keeps_its_batch_whatever_the_split() -> None:
    first = plan(config(devices={"use": "0,1"}), GPUS, FACTS)
    later = plan(config(devices={"use": "0,1,2", "balance": [2, 1, 1]}), GPUS, FACTS, first.fixed)
    assert (later.global_batch_size, later.batch.microbatches_per_device, later.fixed) == (
        64,
        (2, 1, 1),
        first.fixed,
    )


def test_a_device_that_would_only_be_waited_for_gets_nothing() -> None:
    found = made([100, 1], samples=5)
    assert 0 in found.batch.microbatches_per_device
    assert any("device 1 gets no microbatch" in warning for warning in found.warnings)


@pytest.mark.parametrize(
    ("balance", "sections", "says"),
    [
        ([2, 1, 1], {}, "3 speeds for 2 devices"),
        ([2, 1], {"engine": "jax"}, "engine jax runs one program"),
        (
            [2, 1],
            {"devices": {"use": "0,1", "strategy": "fsdp"}},
            "fsdp gathers weights in each round",
        ),
        ([1], {"devices": {"use": "0"}}, "one device takes all"),
        ("measured", {"devices": {"use": "0"}}, "one device takes all"),
        ("measured", {}, "torchrun"),
        ([2, 1], {"batch": {"samples": 64, "accumulate": 2}}, "cuts a step evenly"),
    ],
)
def test_what_cannot_be_uneven_is_refused_by_name(
    balance: Any, sections: dict[str, Any], says: str
) -> None:
    devices = {"use": "0,1", **sections.pop("devices", {}), "balance": balance}
    with pytest.raises(UserError, match=says) as caught:
        made(balance, devices=devices, **sections)
    assert caught.value.remedy


def test_batchnorm_would_follow_the_split() -> None:
    for train in ({}, {"norm_sync": True}, {"norm_sync": True, "allow_coupled": True}):
        with pytest.raises(UserError, match="mixes the samples of a microbatch"):
            made([2, 1], facts=NORMED, train=train)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("even", "even"),
        ("measured", "measured"),
        ([2, 1], (2.0, 1.0)),
        ("2, 1.5", (2.0, 1.5)),
        ("odd", None),
        ([2, 0], None),
        ([2, True], None),
        (["2", 1], None),
        ([], None),
        (2, None),
        ("1,inf", None),
    ],
)
def test_a_list_may_come_from_a_file_or_a_flag(given: Any, kept: Any) -> None:
    document = Document({"batch": {"samples": 4}, "devices": {"balance": given}})
    if kept:
        assert balance_of(load_document(document, Tasks()).config) == kept
    else:
        with pytest.raises(UserError, match="even, measured, or a relative speed for each device"):
            load_document(document, Tasks())


def test_devices_of_two_kinds_get_the_remedy() -> None:
    mixed = replace(GPUS, devices=(GPUS.devices[0], replace(GPUS.devices[1], name="NVIDIA A100")))
    warning_text = "each step waits for the slowest; --balance measured"
    assert any(
        warning_text in warning
        for warning in plan(config(devices={"use": "0,1"}), mixed, FACTS).warnings
    )
    assert not any(
        "slowest" in warning
        for warning in plan(
            config(devices={"use": "0,1", "balance": [2, 1]}), mixed, FACTS
        ).warnings
    )
