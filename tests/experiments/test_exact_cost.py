"""train.exact: measured takes what steps really took, on one device: once, and alike for any
devices.
"""

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import slow

from commands import samecurve, write_config
from samecurve.core.config.sections import Config
from samecurve.core.planning.facts import ExactCost, Facts
from samecurve.core.planning.plan import Plan
from samecurve.core.planning.planner import plan
from samecurve.experiments import exact_cost
from samecurve.experiments.exact_cost import with_exact_cost
from samecurve.run.describe import describe
from samecurve.torch_engine.strategies import exact
from samecurve.worker.jobs.profile_job import watch_rank
from tiny import MACHINE, config_of, tiny_values
from worlds import Pool


def not_repeating(*arguments: Any) -> Any:
    """Sums of gradients in the last digits as chance has them."""
    right = exact.add_gradients

    def add(left: Any, right_one: Any) -> Any:
        total = right(left, right_one)
        first = next(gradient for gradient in total if gradient is not None)
        first.mul_(1 + 1e-5 * (os.urandom(1)[0] + 1))
        return total

    with patch.object(exact, "add_gradients", add):
        return watch_rank(*arguments)


_TURN = itertools.count(1)  # of this rank


def disturbed(*arguments: Any) -> Any:
    """In each turn other programs want more of the device."""
    turn = next(_TURN)
    with slow.every_pass(0.1 if turn == 1 else 0.006 * turn):
        return watch_rank(*arguments)


def never(*_arguments: Any) -> Any:
    raise AssertionError("nothing was to be measured")


def config(corpus: Path, samples: int, **devices: Any) -> Config:
    return config_of(
        tiny_values(
            corpus,
            batch={"samples": samples},
            train={"steps": 50, "precision": "f32", "exact": "measured"},
            devices={"use": "cpu:1", "threads": 1, **devices},
        )
    )


@pytest.fixture
def facts_by(
    corpus: Path, cache: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Config, Facts]]:
    """Measures with a job, on warm ranks; nothing is cached before."""
    shutil.rmtree(cache / "exact-costs", ignore_errors=True)

    @contextmanager
    def warm(*_: Any) -> Iterator[Pool]:
        yield pool

    def measure(job: Callable[..., Any], samples: int = 4, **devices: Any) -> tuple[Config, Facts]:
        monkeypatch.setattr(exact_cost, "pool", warm)
        measured = config(corpus, samples, **devices)
        facts = describe(measured)
        return measured, with_exact_cost(measured, MACHINE, facts, measures=True, job=job)

    return measure


def planned(measured: tuple[Config, Facts]) -> Plan:
    return plan(measured[0], MACHINE, measured[1])


def test_it_is_measured_once_and_decides_alike_on_any_devices(
    facts_by: Callable[..., tuple[Config, Facts]],
) -> None:
    one = planned(facts_by(slow.rows))  # as long for four rows as for four times one
    assert one.compute.exact
    for devices in ({"use": "cpu:2"}, {"use": "cpu:2", "strategy": "fsdp"}, {"strategy": "dp"}):
        others = planned(facts_by(never, **devices))
        assert others.compute.exact
        assert others.batch.micro_batch_size == one.batch.micro_batch_size
        assert others.reasons["exact_auto"] == one.reasons["exact_auto"]


def test_where_microbatches_cost_fewer_are_tried(
    facts_by: Callable[..., tuple[Config, Facts]],
) -> None:
    measured = facts_by(slow.microbatches)
    cost = measured[1].exact_cost
    assert cost is not None
    assert list(cost.ratios) == [8, 2]  # four samples in four microbatches, and in two
    assert cost.ratios[8] > cost.ratios[2] > 1.3
    made = planned(measured)
    assert not made.compute.exact
    assert made.reasons["exact_auto"].startswith("in 4 and 2 microbatches a step takes ")


def test_a_device_that_repeats_no_bits_is_found(
    facts_by: Callable[..., tuple[Config, Facts]],
) -> None:
    for _ in range(2):  # it is measured again
        measured = facts_by(not_repeating)
        cost = measured[1].exact_cost
        assert cost is not None
        assert cost.failure.startswith("the same exact steps gave other bits another time (step")
        assert not planned(measured).compute.exact


def test_a_disturbed_measurement_is_kept_for_plans_and_the_next_start_tries_again(
    facts_by: Callable[..., tuple[Config, Facts]],
) -> None:
    measured, facts = facts_by(disturbed, samples=2)
    made = planned((measured, facts))
    assert not made.compute.exact
    assert "other programs wanted its time (train" in made.reasons["exact_auto"]
    unknown = replace(facts, exact_cost=None)
    kept = with_exact_cost(measured, MACHINE, unknown, measures=False, job=never)
    assert kept.exact_cost == facts.exact_cost
    again = facts_by(slow.rows, samples=2)[1].exact_cost
    assert again is not None
    assert list(again.ratios) == [8]
    assert facts_by(never, samples=2)[1].exact_cost == again


@pytest.mark.parametrize(
    "text", ['{"ratios": {}}', '{"ratios": {"2": NaN}}', '{"ratios": {"3": 0.5}}', "{"]
)
def test_a_damaged_cache_is_not_believed(
    text: str, cache: Path, facts_by: Callable[..., tuple[Config, Facts]]
) -> None:
    with patch.object(exact_cost, "_cache_path", lambda *_: cache / "cost.json"):
        (cache / "cost.json").write_text(text)
        assert "nothing was to be" in planned(facts_by(never)).reasons["exact_auto"]
        (cache / "cost.json").write_text('{"ratios": {"8": 1.02}, "failure": ""}')
        assert planned(facts_by(never)).compute.exact


def test_a_layout_that_is_not_exact_is_not_measured(
    facts_by: Callable[..., tuple[Config, Facts]],
) -> None:
    devices = {"use": "cpu:2", "strategy": "ddp", "compress": "bf16", "balance": "measured"}
    measured = facts_by(never, **devices)  # not refused either, for speeds that are not known yet
    assert measured[1].exact_cost == ExactCost(
        failure="compress bf16 rounds what each device sends"
    )


def test_what_can_not_be_measured_is_no_refusal(
    facts_by: Callable[..., tuple[Config, Facts]],
) -> None:
    made = planned(facts_by(never))
    assert not made.compute.exact
    why = "could not be measured on one device: rank 0 of 1: AssertionError: nothing was"
    assert why in made.reasons["exact_auto"]


@pytest.mark.long
def test_the_first_of_ranks_that_torchrun_starts_measures_for_all(
    corpus: Path, tmp_path: Path
) -> None:
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "-m"),
            *("samecurve", "train", "-f", str(write_config(tmp_path, corpus, 4)), "--dtype", "f32"),
            *("--set", "train.exact=measured", "--set", "train.exact_devices=2"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stderr.count("exact  a few steps on one CPU rank") == 1
    (line,) = (line for line in ended.stdout.splitlines() if "exact (auto): " in line)
    assert "as was measured" in line or "other programs wanted" in line


def test_a_run_is_measured_before_its_first_plan_alone(corpus: Path, tmp_path: Path) -> None:
    options = ["-f", write_config(tmp_path, corpus, 4), "--dtype", "f32", "--global-batch", "8"]
    options += ["--set", "train.exact=measured", "--set", "train.exact_devices=1"]
    asked = samecurve("plan", *options, cwd=tmp_path)
    assert "its cost is not measured yet" in asked.stdout
    train = ["train", *options, "--save-dir", "run"]
    first = samecurve(*train, "--stop-after", "2", cwd=tmp_path)
    assert "exact  a few steps on one CPU rank" in first.stderr
    (line,) = (line for line in first.stdout.splitlines() if "exact (auto): " in line)
    assert "as was measured" in line or "other programs wanted" in line
    later = samecurve(*train, cwd=tmp_path)
    assert "a few steps" not in later.stderr
    assert "as this run began" in later.stdout
