"""Uneven devices: whoever computes how much, the losses are one device's; and a slow device is
measured, given less, and no longer waited for.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import slow

import samecurve.experiments.balance as balancing
from commands import losses
from samecurve.core.config.loading import LoadedConfig
from samecurve.core.config.sections import Config
from samecurve.core.planning.facts import Measure
from samecurve.core.planning.plan import Plan
from samecurve.experiments.balance import measure_speeds
from samecurve.features.balance import with_even_balance
from samecurve.features.balance.uneven_split import microbatch_seconds, predict_step_seconds
from samecurve.observe import read_events
from samecurve.run.directory import Run
from samecurve.run.prepare import StartRequest, prepare
from samecurve.run.resume import Options
from samecurve.tasks import entry_of
from test_promise import worst
from tiny import MACHINE, Outcome, TinyRun, config_of, tiny_values, train_tiny
from worlds import Pool

STEPS = 8
TRIES = 3


@pytest.fixture(scope="module")
def alone(
    pool: Pool, corpus: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Outcome:
    return pool.run(  # type: ignore[no-any-return]
        1,
        train_tiny,
        TinyRun(tmp_path_factory.mktemp("alone"), tiny_values(corpus, train={"steps": 24}), cache),
    )[0]


@pytest.mark.parametrize(
    ("strategy", "speeds"), [("ddp", [3, 1]), ("ddp", [1, 5, 2]), ("dp", [1, 2])]
)
def test_an_uneven_assignment_changes_no_loss(
    strategy: str,
    speeds: list[float],
    *,
    alone: Outcome,
    pool: Pool,
    corpus: Path,
    cache: Path,
    tmp_path: Path,
) -> None:
    """Batch 10, an epoch's tail of 3 that leaves slow devices without a microbatch, token counts
    that differ by sample.
    """
    values = tiny_values(
        corpus,
        train={"steps": 24},
        devices={"use": f"cpu:{len(speeds)}", "strategy": strategy, "balance": speeds},
    )
    found = pool.run(
        1 if strategy == "dp" else len(speeds), train_tiny, TinyRun(tmp_path, values, cache)
    )
    shares = found[0].plan.batch.microbatches_per_device
    assert list(np.argsort(shares)) == list(np.argsort(speeds))
    assert sum(shares) > len(shares)
    assert worst(found[0], alone) <= 1e-12
    for name, array in alone.arrays.items():
        np.testing.assert_allclose(found[0].arrays[name], array, rtol=0, atol=1e-12, err_msg=name)
    assert found[0].evaluated[-1]["loss"] == pytest.approx(alone.evaluated[-1]["loss"], rel=1e-12)
    if strategy == "ddp":
        full = [len(outcome.ids[0]) for outcome in found]
        assert full == [
            sum(end - begin for begin, end in outcome.plan.batch.assignment(10, rank).spans)
            for rank, outcome in enumerate(found)
        ]


def test_a_run_goes_on_with_another_assignment(
    alone: Outcome, pool: Pool, corpus: Path, cache: Path, tmp_path: Path
) -> None:
    last, moved = None, []
    for balance, stop in (("even", 8), ([3, 1], 16), ([1, 2], 24)):
        moved = pool.run(
            2,
            train_tiny,
            TinyRun(
                tmp_path,
                tiny_values(
                    corpus,
                    train={"steps": 24},
                    devices={"use": "cpu:2", "strategy": "ddp", "balance": balance},
                ),
                cache,
                resume=last,
                stop_at=stop,
            ),
        )
        last = tmp_path / "checkpoints" / f"step-{stop:08d}"
    assert worst(moved[0], alone) <= 1e-12


@pytest.mark.parametrize(("strategy", "speeds"), [("ddp", [1, 3]), ("dp", [4, 1])])
def test_exact_runs_have_the_same_bits_however_assigned(
    strategy: str, speeds: list[float], *, pool: Pool, corpus: Path, cache: Path, tmp_path: Path
) -> None:
    def run(balance: Any) -> Outcome:
        values = tiny_values(
            corpus,
            train={"steps": 20, "precision": "f32", "exact": True, "hash_every": 5},
            devices={"use": "cpu:2", "strategy": strategy, "balance": balance},
        )
        return pool.run(  # type: ignore[no-any-return]
            1 if strategy == "dp" else 2,
            train_tiny,
            TinyRun(tmp_path / str(balance), values, cache),
        )[0]

    plain, uneven = run("even"), run(speeds)
    assert (
        plain.plan.batch.microbatches_per_device
        == (2, 3)
        != uneven.plan.batch.microbatches_per_device
    )
    assert (uneven.hashes, uneven.losses, uneven.norms) == (plain.hashes, plain.losses, plain.norms)


@pytest.mark.long
def test_a_slow_rank_is_measured_and_no_longer_waited_for(
    *,
    pool: Pool,
    corpus: Path,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The second rank's forward pass lasts three times as long for each row.

    Tried again if this machine has done much else meanwhile.
    """

    @contextmanager
    def warm(*_: Any) -> Iterator[Pool]:
        yield pool

    def train(name: str, config: Config, measure: Measure | None) -> tuple[Run, Plan]:
        request = StartRequest(
            loaded=LoadedConfig(config, "tiny", {}),
            options=Options(save_dir=tmp_path / name),
            facts=entry_of(config.task).facts(config, str(cache)),
            machine=MACHINE,
            measure=measure,
        )
        prepared = prepare(request)
        prepared.lock.release()
        pool.run(2, slow.rehearsed, prepared.attempt.to_json())
        return prepared.run, prepared.plan

    config = config_of(
        tiny_values(
            corpus,
            batch={"samples": 8},
            train={"steps": STEPS},
            devices={
                "use": "cpu:2",
                "strategy": "ddp",
                "balance": "measured",
                "preflight": 0,
                "threads": 1,
            },
        )
    )
    promised: list[float] = []
    rose: list[float] = []
    while not promised or (abs(rose[-1] / promised[-1] - 1) > 0.2 and len(rose) < TRIES):
        shutil.rmtree(cache / "speeds", ignore_errors=True)
        monkeypatch.setattr(balancing, "pool", warm, raising=False)  # deleted below
        speeds = measure_speeds(
            config, MACHINE, entry_of(config.task).facts(config, str(cache)), slow.rows
        ).measured.speeds
        monkeypatch.delattr(balancing, "pool")  # what was measured is kept
        assert speeds is not None
        (plain, before), (uneven, after) = (
            train(f"even-{len(rose)}", with_even_balance(config), None),
            train(f"uneven-{len(rose)}", config, measure_speeds),
        )
        promised.append(
            predict_step_seconds(speeds, 8, before.micro_batch_size)
            / predict_step_seconds(
                speeds, 8, after.micro_batch_size, after.batch.microbatch_seconds
            )
        )
        rose.append(seconds(plain) / seconds(uneven))
        first, second = microbatch_seconds(speeds, before.micro_batch_size)
        assert (before.batch.microbatches_per_device, before.micro_batch_size) == ((1, 1), 4)
        assert after.batch.microbatches_per_device[0] > after.batch.microbatches_per_device[1] > 0
        np.testing.assert_allclose(losses(uneven.home), losses(plain.home), rtol=1e-12)
    assert second / first == pytest.approx(3, rel=0.3)
    assert promised[-1] > 1.3
    assert rose[-1] == pytest.approx(promised[-1], rel=0.2), (promised, rose)
    assert capsys.readouterr().err.count("are measured anew") == 2 * len(rose)


def seconds(run: Run) -> float:
    """Of a step, when nothing else went on."""
    return float(
        min(
            event.values["seconds"]
            for event in read_events(run.journal)
            if event.kind == "step" and event.step > 2
        )
    )
