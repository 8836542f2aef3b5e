"""What a config can have besides a strategy, on emulated GPUs: adapters on offloaded weights, the
sentinel, a moving average, recompute, ranks that share a GPU, runs that move.

A compiled step is left out: Triton's kernels need a real GPU.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from emulated import only_emulated
from gpu_runs import ONE, THREE, TWO, check_equal, check_waits, leg, train
from strategy_runs import Answer

pytestmark = only_emulated
F64 = {"precision": "f64", "eval_every": 4}
ADAPTER = {"kind": "lora", "rank": 2, "alpha": 4, "dropout": 0.1, "target": "all-linear"}
LLAMA = {
    "architecture": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}


def lora(
    corpus: Path,
    use: str,
    strategy: str,
    quantize: str = "none",
    train: Mapping[str, Any] = F64,
    **devices: Any,
) -> dict[str, Any]:
    """A LoRA with dropout on a Llama of three layers."""
    return {
        "values": {
            "task": "huggingface",
            "model": {**LLAMA, "adapter": ADAPTER, "quantize": quantize},
            "data": {
                "source": str(corpus),
                "tokenizer": "bytes",
                "seq_len": 16,
                "validation": 0.1,
                "eval_samples": 8,
            },
            "batch": {"samples": 10, "per_device": 2},
            "optimizer": {"lr": 1e-2},
            "train": {"steps": 5, "exact": False, "log_every": 100, **train},
            "devices": {"use": use, "strategy": strategy, **devices},
        }
    }


def check_all(answers: Mapping[str, Answer], reference: str) -> None:
    for answer in answers.values():
        check_equal(answer, answers[reference])


@pytest.mark.long  # NCCL's refusal is waited for
def test_two_ranks_on_one_gpu_meet_over_gloo_alone(tmp_path: Path, corpus: Path) -> None:
    gloo: dict[str, Any] = {
        "devices": {"sync": "gloo"},
        "train": {**F64, "ema": 0.5, "sentinel": 2},
    }
    nccl: dict[str, Any] = {"devices": {"preflight": 0}, "train": F64}
    runs = {
        "cpu": [leg(corpus, "cpu:1", "single", train={**F64, "ema": 0.5})],
        "gloo": [leg(corpus, TWO, "ddp", shares_gpu=True, **gloo)],
        "nccl": [leg(corpus, TWO, "ddp", shares_gpu=True, **nccl)],
    }
    answers = train(tmp_path, runs, devices=2)
    assert "Duplicate GPU" in answers.pop("nccl").refused
    check_all(answers, "cpu")


@pytest.mark.long  # twenty runs
@pytest.mark.parametrize("quantize", ["none", "bf16", "8bit", "4bit"])
def test_an_adapter_in_every_place_of_its_base(quantize: str, tmp_path: Path, corpus: Path) -> None:
    runs = {"cpu": [lora(corpus, "cpu:1", "single", quantize)]}
    for use, strategy in ((ONE, "single"), (TWO, "dp"), (THREE, "ddp")):
        for share in (0.0, 0.5, 1.0):
            name = f"{strategy}, {share:.0%} in host memory"
            runs[name] = [lora(corpus, use, strategy, quantize, offload_frozen=share)]
    runs["fsdp"] = [lora(corpus, THREE, "fsdp", quantize)]
    again = {**F64, "recompute": "block"}
    runs["again"] = [lora(corpus, TWO, "ddp", quantize, again, offload_frozen=1.0)]
    answers = train(tmp_path, runs)
    check_all(answers, "cpu")
    for name in answers:
        check_waits(answers[name])


@pytest.mark.long  # thirty runs
@pytest.mark.parametrize(
    "settings",
    [
        {"sentinel": 2},
        {"ema": 0.5},
        {"recompute": "block"},
        {"recompute": "selective"},
        {"check_replicas": 2},
        {"non_finite": "skip"},
        {"sentinel": 1, "ema": 0.9, "recompute": "block", "check_replicas": 1},
    ],
    ids=",".join,
)
def test_a_setting_of_the_training_changes_no_curve(
    settings: Mapping[str, Any], tmp_path: Path, corpus: Path
) -> None:
    given = {**F64, **settings}
    runs = {"cpu": [leg(corpus, "cpu:1", "single", train=given)]}
    for use, strategy in ((ONE, "single"), (TWO, "dp"), (THREE, "ddp"), (THREE, "fsdp")):
        runs[strategy] = [leg(corpus, use, strategy, train=given)]
    check_all(train(tmp_path, runs), "cpu")


@pytest.mark.long  # ten runs
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adafactor", "muon", "adamw8bit"])
def test_each_optimizer_trains_as_on_cpus(optimizer: str, tmp_path: Path, corpus: Path) -> None:
    named: dict[str, Any] = {"train": F64, "optimizer": {"name": optimizer}}
    if optimizer == "adamw8bit":  # it keeps arrays of 4096 numbers and more in eight bits
        named["model"] = {"hidden_size": 64, "intermediate_size": 64}
    runs = {"cpu": [leg(corpus, "cpu:1", "single", **named)]}
    for use, strategy in ((ONE, "single"), (TWO, "dp"), (TWO, "ddp"), (THREE, "fsdp")):
        runs[strategy] = [leg(corpus, use, strategy, **named)]
    answers = train(tmp_path, runs)
    check_all(answers, "cpu")
    for strategy in ("single", "dp", "ddp", "fsdp"):
        check_waits(answers[strategy])


@pytest.mark.long  # nine runs, most of several legs
@pytest.mark.parametrize("settings", [{}, {"ema": 0.5, "recompute": "block"}])
def test_a_checkpoint_moves_between_gpus_and_cpus(
    settings: Mapping[str, Any], tmp_path: Path, corpus: Path
) -> None:
    """Each curve is that of a run that was never stopped."""
    given = {**F64, "keep": 0, **settings}
    journeys = {
        "gpu, cpu, gpu": [(ONE, "single", 1), ("cpu:1", "single", 3), (ONE, "single", None)],
        "more gpus": [(ONE, "single", 2), (TWO, "dp", 3), (THREE, "fsdp", None)],
        "fewer gpus": [(THREE, "ddp", 2), ("cpu:3", "ddp", 4), (TWO, "ddp", None)],
        "cpu, gpus, cpu": [("cpu:2", "fsdp", 2), (THREE, "fsdp", 4), ("cpu:1", "single", None)],
        "other strategies": [(THREE, "fsdp", 1), (TWO, "ddp", 3), ("cpu:2", "fsdp", None)],
    }
    runs = {"unbroken": [leg(corpus, "cpu:1", "single", train=given)]}
    for name, legs in journeys.items():
        runs[name] = [
            leg(corpus, use, strategy, stop_at=stop_at, train=given)
            for use, strategy, stop_at in legs
        ]
    check_all(train(tmp_path, runs), "unbroken")
