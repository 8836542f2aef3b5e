"""Samecurve's strategies on emulated GPUs: the curve of CPU ranks, one hash under exact, no race.

A compiled step is left out: Triton's kernels need a real GPU.
"""

from pathlib import Path
from typing import Any

import pytest
from emulated import only_emulated
from gpu_runs import FOUR, ONE, THREE, TWO, check, check_waits, leg, train

pytestmark = only_emulated
LAUNCHES = {"single": 1700, "dp": 1750, "ddp": 1060, "fsdp": 780}  # of a steady step in f64


def test_each_strategy_trains_as_cpus_do(tmp_path: Path, corpus: Path) -> None:
    """Losses, hashes, findings, host syncs, launches and memory, of one process and its ranks."""
    layouts = [(ONE, "single"), (TWO, "dp"), (TWO, "ddp"), (THREE, "fsdp")]
    f64, exact = {"precision": "f64"}, {"precision": "f32", "exact": True}
    runs = {strategy: [leg(corpus, use, strategy, train=f64)] for use, strategy in layouts}
    runs["cpu"] = [leg(corpus, "cpu:1", "single", train=f64)]
    for use, strategy in [(ONE, "single"), (TWO, "ddp"), (TWO, "fsdp")]:
        runs[f"exact {strategy}"] = [leg(corpus, use, strategy, train=exact)]
    answers = train(tmp_path, runs)
    for answer in answers.values():
        check(answer)
        check_waits(answer)
    for strategy, most in LAUNCHES.items():
        assert answers[strategy].curve == pytest.approx(answers["cpu"].curve, rel=1e-12, abs=0)
        assert 0 < answers[strategy].launches <= most, strategy
    hashes = {answer.hash for name, answer in answers.items() if name.startswith("exact")}
    assert len(hashes) == 1
    assert hashes != {""}
    assert answers["single"].memory <= answers["single"].estimate


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
    if exact:  # vectors that 2, 3 and 4 devices cut into whole registers of this CPU, whose kernels
        # round the rest in another way; a GPU has no such rest
        settings["model"] = {"hidden_size": 192, "intermediate_size": 192}
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
