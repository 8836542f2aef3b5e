"""train.exact: auto on real ranks: one hash where the plan takes it, and resumes that keep it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from samecurve.checkpoint import read_manifest
from tiny import Outcome, TinyRun, tiny_values, train_tiny
from worlds import Pool

STEPS = 6
OWN_TASK = """
import numpy as np
import torch
from torch import nn
from samecurve import Mean


class Rows:
    def __len__(self):
        return 16384

    def __getitem__(self, ids):
        return {"x": (ids[:, None] * np.arange(1, 25) % 7).astype(np.float32)}


class Task:
    def model(self):
        wide = nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Dropout(0.1))
        return nn.Sequential(nn.Linear(24, 512), nn.Tanh(), wide, nn.Linear(512, 1))

    def loss(self, model, batch):
        errors = (model(batch["x"]) - batch["x"].mean(-1, keepdim=True)).square()
        return Mean(errors.sum(), errors.numel())

    def train_data(self):
        return Rows()
"""


def values(corpus: Path, use: str, strategy: str = "auto", **train: Any) -> dict[str, Any]:
    """A model with enough work in a microbatch: 32 samples of 256 tokens, in four of them."""
    return tiny_values(
        corpus,
        model={"hidden_size": 128, "max_seq_len": 256},
        batch={"samples": 32},
        train={
            "steps": STEPS,
            "precision": "f32",
            "hash_every": 2,
            "exact_devices": 4,
            "save_every": 2,
            **train,
        },
        devices={"use": use, "strategy": strategy},
    )


def test_auto_gives_one_hash_and_a_resume_keeps_it(
    pool: Pool, corpus: Path, cache: Path, tmp_path: Path
) -> None:
    def train(name: str, world: int, config: dict[str, Any], resume: Path | None = None) -> Outcome:
        tiny = TinyRun(tmp_path / name, config, cache, resume=resume)
        outcome: Outcome = pool.run(world, train_tiny, tiny)[0]
        return outcome

    one = train("one", 1, values(corpus, "cpu:1"))
    says = "the same bits on up to 4 devices; --devices cpu:4 uses all cores"
    assert one.plan.reasons["exact_auto"] == says
    assert sorted(one.hashes) == [2, 4, 6]
    two = train("two", 2, values(corpus, "cpu:2"))
    assert (two.hashes, two.losses) == (one.hashes, one.losses)
    (saved,) = (tmp_path / "one" / "checkpoints").glob("step-*4")
    assert read_manifest(saved)["fixed"]["exact"]
    # cores that fsdp leaves idle, and what its cost is now foreseen to be, no longer matter
    moved = train("moved", 2, values(corpus, "cpu:2", "fsdp"), resume=saved)
    assert "kept from the run's start" in moved.plan.reasons["exact_auto"]
    assert moved.hashes[6] == one.hashes[6]
    ordinary = train("ordinary", 2, values(corpus, "cpu:2", exact=False))
    assert not ordinary.hashes
    assert ordinary.losses != one.losses


# plans as on a machine of so many cores; the ranks really have the threads that are planned
ON_CORES = """
import samecurve.probe as machine
machine.cpu_cores = lambda numbers=None: {cores}
from samecurve.cli.entry import run
run()
"""


@pytest.mark.parametrize(
    ("cores", "threads"),
    [
        pytest.param(2, 1, marks=pytest.mark.long),
        pytest.param(12, 3, marks=pytest.mark.long),
    ],
)
def test_auto_gives_one_hash_for_a_users_file(cores: int, threads: int, tmp_path: Path) -> None:
    """Its work is counted: on one rank and on two, from the command line.

    threads: inside an operation, whatever the ranks
    """
    (tmp_path / "own.py").write_text(OWN_TASK)
    config = tmp_path / "own.yaml"
    config.write_text("task: own.py:Task\nbatch: {samples: 8192}\n")
    hashes = []
    for use in ("cpu:1", "cpu:2"):
        home = tmp_path / use.replace(":", "-")
        command = ["train", "-f", str(config), "--devices", use, "--save-dir", str(home)]
        command += ["--max-steps", "4", "--set", "train.hash_every=2"]
        command += ["--set", f"devices.threads={threads}"]
        ended = subprocess.run(
            [sys.executable, "-c", ON_CORES.format(cores=cores), *command],
            cwd=tmp_path,
            env=dict(os.environ),
            capture_output=True,
            text=True,
            check=True,
        )
        assert "exact (auto): the same bits on up to 8 devices" in ended.stdout
        assert json.loads((home / "plan.json").read_text())["plan"]["threads"] == threads
        hashes.append([line for line in ended.stdout.splitlines() if line.startswith("hash ")])
    assert len(hashes[0]) == 2
    assert hashes[0] == hashes[1]
