"""Memory: what one device can't hold is shared out, and running out of it ends with the flags that
fit.
"""

import re
import shlex
from pathlib import Path

import pytest

from commands import losses, samecurve
from samecurve.core.config.document import Document
from samecurve.core.config.loading import load_document
from samecurve.core.events import Activity
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.machine import Device, Machine
from samecurve.core.planning.planner import plan
from samecurve.diagnose.memory import explain_out_of_memory
from samecurve.observe import read_events
from samecurve.tasks import Tasks

LARGE = """\
model: {{hidden_size: 512, num_layers: 8, num_heads: 8, intermediate_size: 1408, max_seq_len: 16}}
data: {{source: {corpus}, eval_samples: 1}}
batch: {{samples: 4}}
train: {{steps: 3}}
devices: {{use: "cpu:2"}}
"""

GREEDY = '''\
import resource
import numpy as np
import psutil
import torch
from torch import nn
from samecurve import Mean

class Source:
    def __len__(self):
        return 640
    def __getitem__(self, ids):
        return {"x": np.asarray(ids, dtype=np.float32)[:, None] / 640}

class Wide(nn.Module):
    """Keeps 12 MB a sample for backward."""
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(500_000))
    def forward(self, x):
        for _ in range(3):
            x = torch.abs(x * self.scale)
        return x

class Greedy:
    def __init__(self, model, data):
        pass
    def model(self):
        return Wide()
    def loss(self, model, batch):
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit == resource.RLIM_INFINITY:  # what the process has, and 0.8 GB more
            most = psutil.Process().memory_info().vms + 800_000_000
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
        return Mean(model(batch["x"]).mean(1).sum(), len(batch["x"]))
    def train_data(self):
        return Source()
'''


def _peak(run: Path) -> int:
    finished = read_events(run / "journal.jsonl")[-1].values
    return int(max(finished["memory_bytes_by_device"]))


GIB = 1 << 30
GPUS = Machine(
    devices=tuple(Device(kind="cuda", index=at, name="H100", memory=80 * GIB) for at in range(2)),
    links=(),
    host_bytes=64 * GIB,
    cores=8,
)
FACTS = Facts.of(
    samples=100,
    eval_samples=0,
    tokens_per_sample=1,
    params=1000,
    trainable=1000,
    blocks=1,
    bytes_per_sample=GIB,
    flops_per_sample=1e9,
    coupled=(),
    fingerprint="x",
)


class OutOfMemoryError(RuntimeError):
    """As torch names it."""


@pytest.mark.parametrize(
    ("own", "says"),
    [("78.40 GiB", ""), ("9.40 GiB", "; other processes held 69.0 GiB of it")],
)
def test_a_full_gpu_is_named_with_what_others_hold(own: str, says: str) -> None:
    """Two GPUs in one process, of which the second is full; torch's own words."""
    config = load_document(
        Document({"batch": {"samples": 4}, "devices": {"use": "0,1", "strategy": "dp"}}), Tasks()
    ).config
    error = explain_out_of_memory(
        OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 80.00"
            " GiB of which 1.60 GiB is free. Including non-PyTorch memory, this process has"
            f" {own} memory in use. Of the allocated memory 9.10 GiB is allocated by PyTorch, and"
            " 20.00 MiB is reserved by PyTorch but unallocated."
        ),
        plan(config, GPUS, FACTS),
        rank=0,
        peak_bytes=9 * GIB,
    )
    assert error is not None
    assert error.cause == (
        "rank 0 ran out of memory on cuda:1 (H100, 80.0 GiB): it had held 9.0 GiB at most, and"
        f" asked for 2.0 GiB more, with 2 samples at once{says}"
    )
    assert error.remedy.startswith("end the other processes (`nvidia-smi` lists") == bool(says)
    assert error.remedy.endswith("; it goes on from the last save")


@pytest.mark.parametrize(
    ("activity", "says", "remedy"),
    [
        ("step", "with 4 samples at once", "--batch-size 1 .*, or --set train.recompute=block"),
        (
            "evaluate",
            "with 4 samples at once, in an evaluation",
            "--batch-size 1 .*, or --set train.eval_every=0 leaves evaluations out;",
        ),
        ("sample", "while it made samples", "--set train.sample_every=0 makes no samples;"),
    ],
)
def test_the_remedy_is_for_what_the_rank_did(activity: Activity, says: str, remedy: str) -> None:
    """A sample takes 50 GiB of the 80. The process itself is in no GPU's measured memory."""
    config = load_document(
        Document({"batch": {"samples": 4}, "devices": {"use": "0"}}), Tasks()
    ).config
    full = OutOfMemoryError("CUDA out of memory. Tried to allocate 200.00 GiB.")
    error = explain_out_of_memory(
        full, plan(config, GPUS, FACTS), rank=0, peak_bytes=1 << 20, activity=activity
    )
    assert error is not None
    assert error.cause.endswith(says)
    assert re.search(f"^the same command with .*{remedy}", error.remedy)


@pytest.mark.long
def test_a_model_beyond_one_devices_memory_trains_under_fsdp(tmp_path: Path, corpus: Path) -> None:
    """26M parameters, 407 MB of state: refused for ddp under a limit of 760 MiB a rank, taken by
    auto's fsdp, which stays near half of what ddp really holds.
    """
    (tmp_path / "large.yaml").write_text(LARGE.format(corpus=corpus))
    limit = ("--set", "devices.memory=760MiB")
    refused = samecurve(
        "train", "-f", "large.yaml", *limit, "--strategy", "ddp", cwd=tmp_path, code=2
    ).stderr
    assert "on each device under ddp" in refused
    assert "--strategy fsdp" in refused
    for name, flags in (
        ("fsdp", limit),
        ("ddp", ("--strategy", "ddp")),
        (
            "empty",
            (
                "--strategy",
                "ddp",
                "--set",
                "model.hidden_size=16",
                "--set",
                "model.intermediate_size=16",
            ),
        ),
    ):
        arguments = ("-f", "large.yaml", *flags, "--save-dir", name)
        samecurve("train", *arguments, cwd=tmp_path, afresh=True)
    base, ddp, fsdp = (_peak(tmp_path / name) for name in ("empty", "ddp", "fsdp"))
    assert "fsdp" in (tmp_path / "fsdp/plan.json").read_text()
    assert fsdp <= 760 << 20
    assert 0.4 < (fsdp - base) / (ddp - base) < 0.7
    assert (
        max(
            abs(a - b)
            for a, b in zip(losses(tmp_path / "fsdp"), losses(tmp_path / "ddp"), strict=True)
        )
        < 1e-5
    )


@pytest.mark.long
def test_out_of_memory_ends_with_flags_that_keep_the_batch_and_fit(tmp_path: Path) -> None:
    """Two real ranks under a real limit; the command that is suggested is then run as it stands."""
    (tmp_path / "greedy.py").write_text(GREEDY)
    command = [
        "train",
        "--set",
        "task=greedy.py:Greedy",
        "--devices",
        "cpu:2",
        "--max-steps",
        "1",
        "--global-batch",
        "128",
        "--save-dir",
        "run",
    ]
    said = samecurve(*command, cwd=tmp_path, code=1).stderr
    found = re.search(r"rank \d ran out of memory on cpu .* with 64 samples at once", said)
    assert found, said
    suggested = re.search(r"(--global-batch 128 --batch-size \d+) keeps the batch of 128", said)
    assert suggested, said
    done = samecurve(
        *[part for part in command if part not in {"--global-batch", "128"}],
        *shlex.split(suggested[1]),
        cwd=tmp_path,
    )
    assert "keeps" not in done.stderr
    assert len(losses(tmp_path / "run")) == 1
