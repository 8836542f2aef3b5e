"""Small configs for runs on emulated GPUs, the process that trains them, and what must hold."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from strategy_runs import Answer

from samecurve_products.rehearse.emulated_cuda.machine import Emulation

HERE = Path(__file__).parent
ONE, TWO, THREE, FOUR = "0", "0,1", "0,1,2", "0,1,2,3"
Legs = Sequence[Mapping[str, Any]]


def leg(
    corpus: Path,
    use: str,
    strategy: str,
    *,
    stop_at: int | None = None,
    shares_gpu: bool = False,
    **sections: Mapping[str, Any],
) -> dict[str, Any]:
    """A small decoder of two layers for five steps. sections: what the config has besides."""
    values: dict[str, Any] = {
        "model": {
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 2,
            "kv_heads": 1,
            "intermediate_size": 48,
            "max_seq_len": 16,
        },
        "data": {"source": str(corpus), "validation": 0.1, "eval_samples": 8, "prompts": []},
        "batch": {"samples": 10, "per_device": 2},
        "optimizer": {"lr": 1e-2, "clip": 0.5},
        "train": {"steps": 5, "exact": False, "eval_every": 0, "log_every": 100},
        "devices": {"use": use, "strategy": strategy},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return {"values": values, "stop_at": stop_at, "shares_gpu": shares_gpu}


def train(home: Path, runs: Mapping[str, Legs], *, devices: int = 3) -> dict[str, Answer]:
    """Train all runs in one process and its warm ranks."""
    cases, answers = home / "cases.json", home / "answers.json"
    cases.write_text(json.dumps(runs))
    done = subprocess.run(
        [sys.executable, "-m", "strategy_runs", cases, answers],
        cwd=home,
        env=environment(devices),
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert not done.returncode, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return {name: Answer(**answer) for name, answer in json.loads(answers.read_text()).items()}


def environment(devices: int) -> dict[str, str]:
    emulated = Emulation(devices=devices).environment()
    paths = os.pathsep.join([emulated["PYTHONPATH"], str(HERE)])
    return {**os.environ, **emulated, "PYTHONPATH": paths}


def check(answer: Answer, *, steps: int = 5) -> None:
    """The run came to its end, and the emulator found nothing."""
    assert not answer.refused
    assert len(answer.curve) == 2 * steps
    assert answer.findings == []


def check_equal(answer: Answer, wanted: Answer, *, steps: int = 5, near: float = 1e-12) -> None:
    """The run came to its end, was clean, and has the curve and the evaluations of the other."""
    check(answer, steps=steps)
    assert answer.curve == pytest.approx(wanted.curve, rel=near, abs=0)
    assert len(answer.evaluated) == len(wanted.evaluated)
    assert answer.evaluated == pytest.approx(wanted.evaluated, rel=near, abs=1e-15)


def check_waits(answer: Answer) -> None:
    """The host waits once: for the step before, of which it writes the line, with one step queued.

    Within a step it waits for nothing. Only transformers does so itself: where it looks whether a
    mask hides anything, and for each expert of a mixture.
    """
    own = [lines for lines in answer.syncs_at if not _is_of_transformers(lines)]
    assert answer.syncs <= 1 or len(own) < len(answer.syncs_at), answer.syncs_at
    of_metrics = "event.synchronize", "torch_engine/step/step_metrics.py", "core/step_logger.py"
    for lines in own:
        assert all(name in line for name, line in zip(of_metrics, lines.split("\n"), strict=False))


def _is_of_transformers(lines: str) -> bool:
    """Whether the library's own code waits. lines: the operation, and Python's lines above it."""
    frames = [line for line in lines.split("\n")[1:] if "/huggingface/float64.py:" not in line]
    return bool(frames) and "/site-packages/transformers/" in frames[0]
