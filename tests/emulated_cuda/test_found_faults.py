"""Faults of GPU runs that emulated GPUs have found: each stays mended.

CPU ranks have one kind of memory, so none of these faults can be seen there.
"""

import os
import subprocess
from pathlib import Path

import pytest
from emulated import only_emulated

from commands import command, samecurve, write_config
from samecurve.observe import read_events
from samecurve_products.rehearse.emulated_cuda.machine import Emulation
from samecurve_products.rehearse.emulated_cuda.report import read

pytestmark = only_emulated
OFFLOADED = ("--strategy", "fsdp", "--set", "devices.offload=true")
SHORT = (
    "--no-exact",
    "--max-steps",
    "3",
    "--set",
    "train.eval_every=2",
    "--set",
    "data.prompts=[]",
)
LONGER = ("--max-steps", "5")
ON_TWO = ("--devices", "0,1", *SHORT)


def train(emulation: Emulation, cwd: Path, *arguments: object) -> None:
    done = subprocess.run(
        command("train", *arguments),
        cwd=cwd,
        env={**os.environ, **emulation.environment()},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert not done.returncode, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def losses(run: Path) -> list[float]:
    """The losses of a run's steps and evaluations, and the norms of its gradients."""
    return [
        event.values[name]
        for event in read_events(run / "journal.jsonl")
        for name in ("loss", "grad_norm")
        if name in event.values
    ]


def test_sharded_state_in_host_memory_trains_as_cpu_ranks(tmp_path: Path, corpus: Path) -> None:
    """The split check compared gradients of two devices, and the moving average of the weights
    read its share before the copy to host memory had ended.
    """
    given = ("-f", write_config(tmp_path, corpus), "--set", "train.ema=0.5")
    train(Emulation(devices=2), tmp_path, *given, *ON_TWO, *OFFLOADED, "--save-dir", "gpus")
    on_cpus = ("--devices", "cpu:2", "--strategy", "fsdp", "--save-dir", "cpus")
    samecurve("train", *given, *SHORT, *on_cpus, cwd=tmp_path)
    ours, theirs = losses(tmp_path / "gpus"), losses(tmp_path / "cpus")
    assert len(ours) > 6
    assert ours == pytest.approx(theirs, rel=1e-12)


@pytest.mark.long  # three more runs of the whole program; the test above holds the place of state
@pytest.mark.parametrize("precision", ["bf16", "f16"])
def test_parameters_that_no_rank_cuts_are_moved_with_those_in_host_memory(
    precision: str, tmp_path: Path, corpus: Path
) -> None:
    """Vectors lie whole on each GPU beside weights that are gathered in two bytes. The step scaled
    and moved tensors of two devices at once.
    """
    options = ("--set", f"train.precision={precision}", "--set", "train.ema=0.5")
    given = ("-f", write_config(tmp_path, corpus), *ON_TWO, *options)
    train(Emulation(devices=2), tmp_path, *given, *OFFLOADED, "--save-dir", "off")
    train(Emulation(devices=2), tmp_path, *given, "--strategy", "fsdp", "--save-dir", "on")
    assert losses(tmp_path / "off") == losses(tmp_path / "on")
    train(Emulation(devices=2), tmp_path, "-f", "off/config.yaml", "--resume", "off", *LONGER)
    train(Emulation(devices=2), tmp_path, "-f", "on/config.yaml", "--resume", "on", *LONGER)
    assert losses(tmp_path / "off") == losses(tmp_path / "on")


@pytest.mark.long  # tests/torch_engine/test_frozen_offload.py holds the wait itself
def test_no_copy_ahead_of_frozen_weights_runs_while_they_are_moved(tmp_path: Path) -> None:
    """The split check moves weights in host memory, once more samples than one microbatch has."""
    root = Path(__file__).parents[2]
    given = ("--devices", "0", "--no-exact", "--max-steps", "1", "--set", "batch.per_device=4")
    reports = tmp_path / "reports"
    reports.mkdir()
    offloaded = (*given, "--set", "devices.offload_frozen=1", "--save-dir", tmp_path / "run")
    train(Emulation(devices=1, report=reports), root, "-f", "models/lora-chat.yaml", *offloaded)
    assert [finding for process in read(reports) for finding in process.findings] == []
