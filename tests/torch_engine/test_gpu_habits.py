"""What a GPU asks of the engine, as far as a CPU can show it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from samecurve.core.config.document import Document
from samecurve.core.config.loading import load_document
from samecurve.features.guard.trial_passes import full_float32
from samecurve.tasks import Tasks, open_task
from samecurve.torch_engine.model.model_setup import seeded
from samecurve.torch_engine.step.step_metrics import PeakMemory

ATTENDING = """
import torch
from torch import nn

class Attending:
    def __init__(self, model, data): ...
    def model(self): return nn.Linear(1, 1)
    def loss(self, model, batch): ...
    def train_data(self): return torch.utils.data.TensorDataset(torch.ones(2, 1))
    def sample(self, model, seed): return [str(torch.backends.cuda.cudnn_sdp_enabled())]
    def respond(self, model, prompt, *, tokens, temperature, seed):
        return str(torch.backends.cuda.cudnn_sdp_enabled())
"""


def test_nothing_is_sampled_by_cudnns_attention(tmp_path: Path) -> None:
    """It builds a plan for each length; whatever stood before stands afterwards."""
    (tmp_path / "attending.py").write_text(ATTENDING)
    values = {"task": f"{tmp_path}/attending.py:Attending", "batch": {"samples": 1}}
    task = open_task(load_document(Document(values), Tasks()).config, "")
    enabled: Any = torch.backends.cuda.cudnn_sdp_enabled
    assert enabled()
    assert task.sample(None, 0) == ["False"]
    assert task.respond(None, "", tokens=1, temperature=0.0, seed=0) == "False"
    assert enabled()


def test_a_gpus_allocator_is_asked_rarely() -> None:
    """Each of 40 steps reports a peak: of the first four steps its own, then of the last read."""
    asked: list[torch.device] = []

    def read(device: torch.device) -> int:
        asked.append(device)
        return len(asked)

    peaks = PeakMemory([torch.device("cuda:0")], read)
    reports = [peaks.report() for _ in range(40)]
    assert len(asked) == 4 + 2
    assert [peak for (peak,) in reports] == [1, 2, 3, *[4] * 13, *[5] * 16, *[6] * 8]


@pytest.mark.parametrize("part", ["cuda.matmul", "cudnn.conv"])
def test_the_split_check_takes_tf32_off_by_the_interface_that_is_in_use(part: str) -> None:
    """A file may use torch's newer one; then even to look at the older raises an error."""
    if not hasattr(torch.backends.cudnn, "conv"):
        pytest.skip("this torch, older than 2.9, has one interface")
    parts: list[Any] = [torch.backends.cuda.matmul, torch.backends.cudnn.conv]
    chosen = parts[part == "cudnn.conv"]
    before = chosen.fp32_precision
    chosen.fp32_precision = value = "tf32" if part == "cuda.matmul" else "ieee"
    try:
        with full_float32():
            assert [one.fp32_precision for one in parts] == ["ieee", "ieee"]
        assert chosen.fp32_precision == value
    finally:
        chosen.fp32_precision = before
    with full_float32():
        assert not torch.backends.cudnn.allow_tf32
    assert torch.backends.cudnn.allow_tf32


def test_a_seed_leaves_generators_as_they_were() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with seeded(7):
        first = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    with seeded(7):
        assert torch.equal(torch.rand(3), first)
    started: Any = torch.cuda.is_initialized
    assert not started()  # a model for the CPU starts no GPU
