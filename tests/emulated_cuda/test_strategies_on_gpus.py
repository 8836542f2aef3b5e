"""Samecurve's strategies on emulated GPUs: the curve of CPU ranks, one hash under exact, no race.

A compiled step is left out: Triton's kernels need a real GPU.
"""

from pathlib import Path
from typing import Any

import pytest
from emulated import only_emulated
from gpu_runs import FOUR, ONE, THREE, TWO, check, check_waits, leg, train
from har_sets import write_har

pytestmark = only_emulated
LAUNCHES = {"single": 1700, "dp": 1750, "ddp": 1060, "fsdp": 780}  # of a steady step in f64


def test_each_strategy_trains_as_cpus_do(tmp_path: Path, corpus: Path) -> None:
    """Losses, hashes, findings, host syncs, launches and memory, of one process and its ranks."""
    layouts = [(ONE, "single"), (TWO, "dp"), (TWO, "ddp"), (THREE, "fsdp")]
    f64, exact = {"precision": "f64"}, {"precision": "f32", "exact": True}
    runs = {strategy: [leg(corpus, use, strategy, train=f64)] for use, strategy in layouts}
    runs["cpu"] = [leg(corpus, "cpu:1", "single", train=f64)]
    runs["moved"] = [
        leg(corpus, use, strategy, stop_at=stop_at, train={**f64, "keep": 0})
        for use, strategy, stop_at in [(ONE, "single", 2), ("cpu:1", "single", 3), (TWO, "dp", 5)]
    ]
    checked: dict[str, Any] = {"devices": {"sync": "gloo"}, "train": {**f64, "sentinel": 2}}
    runs["shared gpu"] = [leg(corpus, TWO, "ddp", shares_gpu=True, **checked)]
    for use, strategy in [(ONE, "single"), (TWO, "ddp"), (THREE, "fsdp")]:
        runs[f"exact {strategy}"] = [leg(corpus, use, strategy, train=exact)]
    runs["sensors"] = [sensor_leg(tmp_path, TWO, "ddp")]
    runs["sensors cpu"] = [sensor_leg(tmp_path, "cpu:1", "single")]
    answers = train(tmp_path, runs)
    for name, answer in answers.items():
        check(answer)
        assert not answer.left, name
        wanted = answers["sensors cpu" if name.startswith("sensors") else "cpu"].curve
        if not name.startswith("exact"):
            assert answer.curve == pytest.approx(wanted, rel=1e-12, abs=0), name
        if name not in {"shared gpu", "moved"}:  # Gloo waits
            check_waits(answer)
    for strategy, most in LAUNCHES.items():
        assert 0 < answers[strategy].launches <= most, strategy
        assert answers[strategy].memory <= answers[strategy].estimate, strategy
    assert answers["shared gpu"].memory < 2 * answers["shared gpu"].estimate
    hashes = {answer.hash for name, answer in answers.items() if name.startswith("exact")}
    assert len(hashes) == 1
    assert hashes != {""}


def sensor_leg(home: Path, use: str, strategy: str) -> dict[str, Any]:
    """A classifier of sensor readings, with weights of its classes and noise on its input."""
    folder = home / "sensors"
    values = {
        "task": "timeseries",
        "model": {"width": 4, "depth": 2, "kernel_size": 3, "class_weights": "balanced"},
        "data": {
            "source": str(folder if folder.exists() else write_har(folder)),
            "augment": {"jitter": 0.1, "scale": 0.2, "time_warp": 0.2},
        },
        "batch": {"samples": 10, "per_device": 5},
        "train": {"steps": 5, "precision": "f64", "exact": False, "log_every": 100},
        "devices": {"use": use, "strategy": strategy},
    }
    return {"values": values}


@pytest.mark.long  # fifty runs
@pytest.mark.parametrize(
    ("precision", "near"),
    [("f64", 1e-12), ("f32", 0.0), ("bf16", 5e-4), ("f16", 2e-2)],
)
def test_each_strategy_in_each_precision(
    precision: str, near: float, tmp_path: Path, corpus: Path
) -> None:
    exact = not near
    settings: dict[str, Any] = {"train": {"precision": precision, "exact": exact}}
    runs = {"single": [leg(corpus, ONE, "single", **settings)]}
    for use in (TWO, THREE, FOUR):
        for strategy in ("dp", "ddp", "fsdp", *(["hsdp"] if use == FOUR else [])):
            runs[f"{strategy}:{len(use) // 2 + 1}"] = [leg(corpus, use, strategy, **settings)]
    answers = train(tmp_path, runs, devices=4)
    for name, answer in answers.items():
        check(answer)
        assert answer.curve == pytest.approx(answers["single"].curve, rel=near, abs=0), name
        assert answer.hash == answers["single"].hash, name
    assert bool(answers["single"].hash) == exact


@pytest.mark.long  # five runs, one of three legs
def test_a_run_moves_to_cpus_and_back_and_keeps_state_in_host_memory(
    tmp_path: Path, corpus: Path
) -> None:
    """Each equals a run on one GPU that nothing interrupts; Gloo gathers no weights of GPUs."""
    f64 = {"precision": "f64", "keep": 0}
    moves = [(TWO, "ddp", 2), ("cpu:2", "fsdp", 4), (THREE, "fsdp", None)]
    gloo = {"sync": "gloo"}
    runs = {
        "unbroken": [leg(corpus, ONE, "single", train=f64)],
        "moved": [
            leg(corpus, use, strategy, stop_at=stop_at, train=f64)
            for use, strategy, stop_at in moves
        ],
        "offload": [leg(corpus, TWO, "fsdp", train=f64, devices={"offload": True})],
        "gloo ddp": [leg(corpus, TWO, "ddp", train=f64, devices=gloo)],
        "gloo fsdp": [leg(corpus, TWO, "fsdp", train=f64, devices=gloo)],
    }
    answers = train(tmp_path, runs)
    refused = answers.pop("gloo fsdp").refused
    assert refused.startswith("strategy fsdp gathers weights between GPUs, which gloo can't")
    for name, answer in answers.items():
        check(answer)
        assert answer.curve == pytest.approx(answers["unbroken"].curve, rel=1e-12, abs=0), name
