"""The first tests on a GPU: golden losses, and operations without a deterministic kernel.

What these tests import is in the kit of a bare GPU machine, but for peft.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from benchmarks.golden import Trainer, compare, golden_losses
from benchmarks.golden_cases import CASES, ROOT, Case

from commands import losses, samecurve
from samecurve.probe import probe
from worlds import Pool

pytestmark = pytest.mark.gpu
OPERATIONS = ("-f", "benchmarks/golden_operations.yaml", "--devices", "0")
WITHOUT_KERNEL = (
    "interpolate(mode='bicubic')",
    "ReflectionPad1d (pad)",
    "AdaptiveAvgPool2d (pool)",
)


def check(name: str, case: Case, pool: Pool, home: Path) -> None:
    train = partial(Trainer(pool, probe(), home).losses, case)
    for row in compare(name, golden_losses()[name], "cuda", train):
        assert row.verdict == "PASS", row


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cases name files of the repository."""
    monkeypatch.chdir(ROOT)


def test_exact_is_refused_on_a_gpu_for_operations_without_a_kernel(tmp_path: Path) -> None:
    """And is off by itself. Without --exact the same config has golden losses, below."""
    run = tmp_path / "run"
    refused = samecurve("train", *OPERATIONS, "--exact", "--save-dir", run, cwd=ROOT, code=2)
    assert "no deterministic kernel on GPUs" in refused.stderr
    assert all(name in refused.stderr for name in WITHOUT_KERNEL)
    assert not run.exists()
    planned = samecurve("plan", *OPERATIONS, cwd=ROOT)
    assert "not exact (auto): unmeasured on GPUs" in planned.stdout


ON_GPUS_ALONE = """
import numpy as np
from torch import nn

from samecurve import Mean


class Rows:
    def __len__(self):
        return 64

    def __getitem__(self, ids):
        return {"x": np.float32([ids, -ids]).T}


class Hidden:
    def model(self):
        return nn.Linear(2, 1)

    def loss(self, model, batch):
        errors = model(batch["x"]).square().sum()
        if errors.is_cuda:
            errors = errors + 0 * errors.detach()[None].histc(4).sum()
        return Mean(errors, len(batch["x"]))

    def train_data(self):
        return Rows()
"""


def test_what_only_a_gpus_step_calls_is_the_same_refusal_before_step_1(tmp_path: Path) -> None:
    """The task is described on the CPU, where this loss calls no such operation."""
    (tmp_path / "hidden.py").write_text(ON_GPUS_ALONE)
    (tmp_path / "hidden.yaml").write_text(
        "{task: hidden.py:Hidden, batch: {samples: 8}, train: {steps: 3}, devices: {use: '0'}}"
    )
    train = ("train", "-f", "hidden.yaml", "--save-dir")
    refused = samecurve(*train, "exact", "--exact", cwd=tmp_path, code=2)
    assert "train.exact: histc has no deterministic kernel on GPUs" in refused.stderr
    assert not (tmp_path / "exact/journal.jsonl").exists()  # what has trained no step is withdrawn
    samecurve(*train, "ordinary", "--no-exact", cwd=tmp_path)
    assert len(losses(tmp_path / "ordinary")) == 3


@pytest.mark.parametrize("name", ["operations", "decoder", "lstm", "lora-chat"])
def test_losses_on_a_gpu_are_near_the_golden_ones(name: str, pool: Pool, tmp_path: Path) -> None:
    """lora-chat holds frozen weights in host memory, which the split check moves."""
    if missing := CASES[name].missing():
        pytest.skip(f"{missing} is not installed")
    check(name, CASES[name], pool, tmp_path)


def test_sharded_state_in_host_memory_has_the_golden_losses(pool: Pool, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU holds the whole state: there is nothing to share")
    case = CASES["decoder"]
    on_gpus = {"devices.offload": True}
    check("decoder", replace(case, strategy="fsdp", on_gpus=on_gpus), pool, tmp_path)
