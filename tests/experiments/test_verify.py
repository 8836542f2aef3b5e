"""`verify` passes what is right, and finds and names what is wrong: each fault is planted in real
ranks.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faults
import pytest

from commands import refused, samecurve, write_config
from samecurve.core.measurement.profile_types import ProfileSchedule
from samecurve.errors import UserError
from samecurve.experiments.layout_runner import LayoutRunner
from samecurve.experiments.layouts import Layout, default_layouts, parse_layout
from samecurve.experiments.profile.profile import plan_profile, run_profile
from samecurve.experiments.verify.verdicts import Verdict, compare_layouts
from samecurve.experiments.verify.verify_report import as_json
from samecurve.run.describe import describe
from samecurve.worker.jobs.train_job import rehearse
from tiny import MACHINE, config_of, tiny_values
from worlds import Pool

TOLERANCE = 1e-10


def run_layouts(
    pool: Pool,
    home: Path,
    corpus: Path,
    layouts: str,
    job: Callable[..., Any] = rehearse,
) -> tuple[LayoutRunner, list[Verdict]]:
    config = config_of(tiny_values(corpus))
    facts = describe(config)
    runner = LayoutRunner(
        config, MACHINE, facts, steps=4, kind="cpu", pool=pool, home=home, job=job
    )
    parsed = [parse_layout(part) for part in layouts.split(",")]
    return runner, list(compare_layouts(runner, parsed, TOLERANCE))


@pytest.mark.long
def test_what_is_right_passes(pool: Pool, corpus: Path, tmp_path: Path) -> None:
    runner, verdicts = run_layouts(
        pool, tmp_path, corpus, "single,dp:3,ddp:2/4,fsdp:3,hsdp:4,ddp:2..fsdp:3..single"
    )
    assert [verdict.verdict for verdict in verdicts] == ["PASS"] * 6, verdicts
    assert all(0 <= verdict.worst <= 1e-12 for verdict in verdicts)
    report = json.loads(as_json(runner, TOLERANCE, verdicts, []))
    assert report["passed"]
    assert report["batch"] == 10
    assert report["layouts"][5]["layout"] == "ddp:2..fsdp:3..single"


@pytest.mark.parametrize(
    "train",
    [
        {"steps": 4, "save_every": 3, "keep": 1, "eval_every": 1, "sample_every": 1},
        *(
            pytest.param(train, marks=pytest.mark.long)
            for train in (
                {"steps": 1, "save_every": 1, "keep": 1},
                {"steps": "1000000ep", "save_every": "0.0001ep", "keep": 10**9, "log_every": 10**9},
                {"steps": 4, "exact": True, "hash_every": 1, "save_every": 1, "seed": 2**62},
                {"steps": 4, "exact": True, "hash_every": 0, "eval_every": "0.001ep", "keep": 0},
                {"steps": 4, "recompute": "block", "non_finite": "skip", "save_every": 10**9},
            )
        ),
    ],
)
def test_no_setting_of_the_users_breaks_an_experiment(
    train: dict[str, Any], pool: Pool, corpus: Path, tmp_path: Path
) -> None:
    """What a run saves, evaluates and keeps is its own; an experiment trains the same steps."""
    config = config_of(tiny_values(corpus, train={"precision": "f64", **train}))
    facts = describe(config)
    steps = None if train["steps"] == 1 else 4
    runner = LayoutRunner(
        config, MACHINE, facts, steps=steps, kind="cpu", pool=pool, home=tmp_path / "verify"
    )
    layouts = [parse_layout("ddp:2"), parse_layout("ddp:2..single")]
    verdicts = list(compare_layouts(runner, layouts[: runner.steps], TOLERANCE))
    assert {verdict.verdict for verdict in verdicts} == {"PASS"}, verdicts
    schedule = ProfileSchedule(warm=1, timed=2, traced=0)
    plan = plan_profile(config, MACHINE, facts, schedule)
    profile = run_profile(config, plan, schedule, ranks=pool, home=tmp_path / "profile")
    assert len(profile.ranks[0].steps) == 2


@pytest.mark.parametrize(
    ("fault", "layout", "culprit"),
    [
        (faults.mean_of_means, "ddp:3", "step 1: the loss differs before any update"),
        (
            faults.one_not_reduced,
            "ddp:2",
            f"step 1: the loss is equal, the gradient is not: {faults.LOST} ",
        ),
        (
            faults.blocks_averaged,
            "fsdp:2",
            "step 1: the loss is equal, the gradient is not: layers.",
        ),
    ],
)
def test_a_planted_fault_is_found_and_named(
    fault: Callable[..., Any],
    layout: str,
    culprit: str,
    *,
    pool: Pool,
    corpus: Path,
    tmp_path: Path,
) -> None:
    _, (sound, faulty) = run_layouts(pool, tmp_path, corpus, f"single,{layout}", fault)
    assert sound.verdict == "PASS"
    assert (faulty.layout, faulty.verdict, faulty.first_step) == (layout, "FAIL", 1)
    assert faulty.worst > 1e-4
    assert faulty.culprit.startswith(culprit), faulty.culprit


@pytest.mark.long
def test_a_rank_with_another_seed_is_found_by_a_probe(
    pool: Pool, corpus: Path, tmp_path: Path
) -> None:
    _, (verdict,) = run_layouts(pool, tmp_path, corpus, "ddp:2", faults.another_seed)
    assert verdict.verdict == "FAILED"
    assert "they hold other plans, or data" in verdict.culprit


@pytest.mark.long
def test_a_rank_that_ends_fails_its_layout_and_no_other(corpus: Path, tmp_path: Path) -> None:
    ranks = Pool(2, tmp_path / "log")
    try:
        _, verdicts = run_layouts(ranks, tmp_path, corpus, "ddp:2,single", faults.dies)
    finally:
        ranks.close()
    assert [verdict.verdict for verdict in verdicts] == ["FAILED", "PASS"]
    assert "rank 1 of 2 ended" in verdicts[0].culprit


def test_layouts_are_read_and_refused() -> None:
    for text in ("single", "ddp:2", "fsdp:3/4", "ddp:2/4..hsdp:4", "jax:8/4", "ddp:2..jax-fsdp:3"):
        assert str(parse_layout(text)) == text
    for text in ("ddp:x", "ddp:0", "dpp:2", "single:2", "ddp:2..", "ddp:2/0", ""):
        with pytest.raises(UserError, match="is no layout"):
            parse_layout(text)
    assert [str(layout) for layout in default_layouts(2, ["torch"], accumulates=True)] == [
        "single",
        "dp:2",
        "ddp:2",
        "fsdp:2",
        "single/4",
        "ddp:2/4",
        "fsdp:2/4",
        "ddp:2..fsdp:2",
    ]
    assert Layout("ddp", 3) in default_layouts(8, ["torch", "jax"], accumulates=False)
    assert default_layouts(8, ["jax", "torch"], accumulates=True)[0] == Layout("jax", 1)


def test_a_layout_that_cannot_be_is_refused_before_anything_runs(
    pool: Pool, corpus: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="layout hsdp:3: strategy hsdp needs groups"):
        run_layouts(pool, tmp_path, corpus, "single,hsdp:3")
    assert not list(tmp_path.iterdir())


def test_the_command_says_pass_and_leaves_nothing_behind(
    corpus: Path, tmp_path: Path, cache: Path
) -> None:
    done = samecurve(
        "verify",
        "-f",
        write_config(tmp_path, corpus),
        "--layouts",
        "single,ddp:2..fsdp:2",
        "--steps",
        "3",
        "--json",
        cwd=tmp_path,
    )
    report = json.loads(done.stdout)
    assert report["passed"]
    assert (report["dtype"], report["steps"]) == ("f64", 3)
    assert [layout["verdict"] for layout in report["layouts"]] == ["PASS", "PASS"]
    assert not list((cache / "verify").iterdir())
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.yaml"}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--layouts", "ddp:two"), "is no layout"),
        (("--dtype", "bf16"), "verify compares in f64 or f32"),
        (
            ("--dtype", "f32", "--set", "optimizer.name=adamw8bit"),
            "verify compares adamw8bit in f64",
        ),
        (("--steps", "1000"), "the config trains 60"),
        (("--layouts", "hsdp:3"), "layout hsdp:3"),
    ],
)
def test_the_command_refuses_what_it_cannot_compare(
    flags: tuple[str, ...],
    says: str,
    *,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    corpus: Path,
    tmp_path: Path,
) -> None:
    assert says in refused(
        monkeypatch, capsys, "verify", "-f", write_config(tmp_path, corpus), *flags, cwd=tmp_path
    )
