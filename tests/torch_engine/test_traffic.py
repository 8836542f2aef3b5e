"""The bytes that simulation/collectives.py predicts are those that torch's collectives carry,
at 64 and 1,024 ranks, for the real engine and the plan of `plan --machine`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CASES: list[dict[str, Any]] = [
    {"machine": "8x8xH100", "strategy": "ddp"},
    {"machine": "128x8xH100", "strategy": "ddp", "rounds": 2},
    {"machine": "8x8xH100", "strategy": "fsdp", "rounds": 2, "recompute": "block"},
    {"machine": "8x8xH100", "strategy": "fsdp", "rounds": 3, "devices": {"gather": "round"}},
    {"machine": "8x8xH100", "strategy": "fsdp", "rounds": 3, "precision": "bf16"},
    {
        "machine": "128x8xH100",
        "strategy": "fsdp",
        "precision": "bf16",
        "devices": {"reshard": False},
        "model": {"tie_embeddings": True},
    },
    {"machine": "8x8xH100", "strategy": "hsdp", "precision": "bf16", "devices": {"shards": 8}},
    {"machine": "128x8xH100", "strategy": "hsdp", "devices": {"shards": 8}, "rounds": 2},
    {
        "machine": "128x8xH100",
        "strategy": "hsdp",
        "devices": {"shards": 8, "gather": "round"},
        "rounds": 2,
    },
    {"machine": "8x8xH100", "strategy": "fsdp", "precision": "bf16", "task": "layouts.py:Small"},
]


@pytest.mark.long
def test_predicted_bytes_are_those_that_the_collectives_carry() -> None:
    """In a process of its own: fake process groups and real ones don't mix.

    A tiny model, so that parameters smaller than the shards are padded.
    """
    found = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("fakes.py")), json.dumps(CASES)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert found.returncode == 0, found.stderr[-3000:]
    for case, answer in zip(CASES, json.loads(found.stdout), strict=True):
        counted, predicted = answer["counted"], answer["predicted"]
        assert counted.keys() == predicted.keys(), case
        for kind, sent in counted.items():
            assert predicted[kind] == pytest.approx(sent, rel=0.02), (case, kind)
