"""What a GPU asks of the engine, as far as a CPU can show it."""

from pathlib import Path
from typing import Any

import torch

from samecurve.core.config.document import Document
from samecurve.core.config.loading import load
from samecurve.tasks import Tasks, open_task
from samecurve.torch_engine.model import seeded
from samecurve.torch_engine.step_metrics import PeakMemory

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
    task = open_task(load(Document(values), Tasks()).config, "")
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
