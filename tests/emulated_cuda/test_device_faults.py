"""GPUs that fail in the middle of a run: what the user reads, and that the next command goes on."""

import os
import subprocess
import time
from pathlib import Path

import pytest
from emulated import only_emulated

from commands import command
from samecurve.observe import read_events
from samecurve_products.rehearse.emulated_cuda.device_faults import (
    ASSERTION,
    ECC,
    LAUNCH_FAILURE,
    LOST,
    DeviceFault,
    plan_fault,
)
from samecurve_products.rehearse.emulated_cuda.gpus import STATE, GpuFaults, write_faults
from samecurve_products.rehearse.emulated_cuda.machine import Emulation

pytestmark = [
    pytest.mark.long,  # a run is two starts of two ranks: 20 s
    only_emulated,
]
CONFIG = """\
model: {{hidden_size: 32, num_layers: 1, num_heads: 2, kv_heads: 1, intermediate_size: 64,
  max_seq_len: 32}}
data: {{source: {corpus}, validation: 0.1, eval_samples: 8}}
batch: {{samples: 8}}
train: {{steps: {steps}, precision: f64, save_every: 4, log_every: 4}}
track: {{sensors_every: 1}}
"""


class Gpus:
    """Two emulated GPUs, the directory that they share, and a config beside it."""

    def __init__(self, home: Path, corpus: Path) -> None:
        self.home, self._corpus = home, corpus
        self.state = home / "state"
        self.state.mkdir()
        emulation = Emulation(devices=2).environment()
        self.environment = {**os.environ, **emulation, STATE: str(self.state)}

    def start(self, *flags: str, steps: int = 16) -> subprocess.Popen[str]:
        (self.home / "small.yaml").write_text(CONFIG.format(corpus=self._corpus, steps=steps))
        return subprocess.Popen(
            command("train", "-f", "small.yaml", "--devices", "0,1", "--save-dir", "run", *flags),
            cwd=self.home,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def train(self, *flags: str) -> tuple[int, str]:
        """The exit code of a run, and what it printed."""
        with self.start(*flags) as run:
            printed, _ = run.communicate(timeout=250)
        return run.returncode, printed


@pytest.fixture
def gpus(tmp_path: Path, corpus: Path) -> Gpus:
    return Gpus(tmp_path, corpus)


@pytest.mark.parametrize(
    ("error", "exit_code", "cause"),
    [
        (LAUNCH_FAILURE, 75, "a GPU failed (unspecified launch failure)"),
        (ECC, 75, "a GPU failed (uncorrectable ECC error)"),
        (LOST, 75, "a GPU failed (unknown error)"),
        (ASSERTION, 1, "a check inside a kernel on the GPU failed, mostly an index out of range"),
    ],
    ids=["launch", "ecc", "lost", "assertion"],
)
def test_a_failed_gpu_is_named_and_the_same_command_goes_on(
    error: tuple[str, int], exit_code: int, cause: str, gpus: Gpus
) -> None:
    plan_fault(gpus.state, DeviceFault(gpu=1, backward=10, error=error[0], code=error[1]))
    code, printed = gpus.train()
    assert code == exit_code, printed
    assert f"error: rank 1: {cause}" in printed
    assert list((gpus.home / "run/checkpoints").glob("step-*"))
    code, printed = gpus.train()
    assert code == 0, printed
    assert "done   step 16" in printed
    events = read_events(gpus.home / "run/journal.jsonl")
    saved = [event.step for event in events if event.kind == "saved"]
    assert saved == [4, 8, 12, 16]


def test_memory_that_another_program_takes_is_told(gpus: Gpus) -> None:
    """Before the optimizer's state is there, which needs memory that torch has not cached yet."""
    wide = ["--set", "model.hidden_size=256", "--set", "model.intermediate_size=1024"]
    plan_fault(gpus.state, DeviceFault(gpu=1, backward=1, memory_taken=84 << 30))
    code, printed = gpus.train(*wide)
    assert code == 1, printed
    assert "ran out of memory on cuda:1 (NVIDIA H100 80GB HBM3, 79.2 GiB)" in printed
    assert "; other processes held " in printed
    assert "remedy: end the other processes (`nvidia-smi` lists them); or the same" in printed
    code, printed = gpus.train(*wide)
    assert code == 0, printed


def test_an_ecc_error_and_a_hot_gpu_are_warned_of_in_mid_run(gpus: Gpus) -> None:
    """The driver counts errors while kernels go on."""
    with gpus.start(steps=100_000) as run:
        try:
            _wait_for_sensors(gpus.home / "run/journal.jsonl")
            hot = GpuFaults(uncorrected_errors=2, celsius=95, slowdowns=0x40)
            write_faults(gpus.state, {1: hot})
            texts = _warnings(gpus.home / "run/journal.jsonl")
        finally:
            run.terminate()
            run.communicate(timeout=100)
    assert texts[0].startswith("cuda:1 (NVIDIA H100 80GB HBM3, rank 1): 2 new errors in its memory")
    assert texts[1].startswith("cuda:1 (NVIDIA H100 80GB HBM3, rank 1): its clock is held down")


def _wait_for_sensors(journal: Path) -> None:
    """Wait for a reading while the run trains; it shows the memory that the ranks hold."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        events = read_events(journal) if journal.exists() else []
        readings = [event for event in events if event.kind == "sensors"]
        if readings and min(readings[-1].values.get("memory_bytes_by_device", [0])) > 512 << 20:
            return
        time.sleep(0.2)
    raise AssertionError("no reading of the sensors")


def _warnings(journal: Path) -> list[str]:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        texts = [str(e.values["text"]) for e in read_events(journal) if e.kind == "warned"]
        found = [text for text in texts if text.startswith("cuda:")]
        if len(found) >= 2:
            return found
        time.sleep(0.2)
    raise AssertionError("no warning")


# each row of an evaluation takes 256 MiB on its GPU, and a step takes none of them
WIDE = """\
import numpy as np
import torch
from torch import nn
from samecurve import Mean


class Rows:
    def __len__(self):
        return 64

    def __getitem__(self, ids):
        return {"x": (ids[:, None] * np.arange(1, 9) % 7).astype(np.float32)}


class Wide:
    def model(self):
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def loss(self, model, batch):
        error = (model(batch["x"]) - batch["x"].mean(1, keepdim=True)).square()
        return Mean(error.sum(), error.numel())

    def metrics(self, model, batch):
        scores = torch.zeros(len(batch["x"]), 1 << 26, device=batch["x"].device)
        scores[:, :1] = model(batch["x"])
        return {"score": Mean(scores[:, 0].sum(), len(scores))}

    def train_data(self):
        return Rows()

    def eval_data(self):
        return Rows()
"""


@pytest.mark.parametrize("use", ["0", "0,1"])
def test_memory_that_an_evaluation_lacks_is_told(use: str, tmp_path: Path) -> None:
    """The same command with fewer rows at once goes on from the last save."""
    (tmp_path / "wide.py").write_text(WIDE)
    (tmp_path / "wide.yaml").write_text(
        "task: wide.py:Wide\nbatch: {samples: 16}\n"
        "train: {steps: 6, precision: f64, save_every: 2, eval_every: 4}\n"
    )
    emulation = Emulation(devices=2, gpu="T4", memory=3 << 29).environment()
    words = ["train", "-f", "wide.yaml", "--devices", use, "--save-dir", "run"]

    def train(*flags: str) -> tuple[int, str]:
        done = subprocess.run(
            command(*words, *flags),
            cwd=tmp_path,
            env={**os.environ, **emulation},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=250,
            check=False,
        )
        return done.returncode, done.stdout

    code, printed = train()
    assert code == 1, printed
    assert " ran out of memory on cuda:" in printed
    assert "at once, in an evaluation" in printed
    assert "remedy: the same command with --global-batch 16 --batch-size 2 keeps the" in printed
    assert "Traceback" not in printed
    code, printed = train("--global-batch", "16", "--batch-size", "2")
    assert code == 0, printed
    assert "done   step 6" in printed
