"""The emulated CUDA devices keep their promises, and name planted faults with their lines."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from emulated import why_skipped

from samecurve_products.rehearse.emulated_cuda import build, report
from samecurve_products.rehearse.emulated_cuda.machine import GPUS, Emulation

HERE = Path(__file__).parent
MIB = 1 << 20
CHECKS = [
    line.split("(")[0].removeprefix("def ")
    for file in ("emulator_checks.py", "operator_checks.py")
    for line in (HERE / file).read_text().splitlines()
    if line.startswith("def check_")
]


def child(arguments: list[str], emulation: Emulation) -> "subprocess.CompletedProcess[str]":
    """Run Python with emulated devices and wait for its end."""
    environment = {**os.environ, **emulation.environment(), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )


@pytest.fixture(scope="module", autouse=True)
def built() -> Path:
    """The emulator's library; the tests skip where it cannot be had, and say why."""
    if reason := why_skipped():
        pytest.skip(reason)
    return build.library()


@pytest.fixture(scope="module")
def results(built: Path) -> dict[str, str]:  # noqa: ARG001
    """The error of each check, empty where it holds; one process runs all."""
    emulation = Emulation(devices=2, memory=64 * MIB)
    done = child([str(HERE / "emulator_checks.py")], emulation)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(rows) == len(CHECKS), f"exit {done.returncode}\n{done.stderr}"
    return {row["check"]: row["error"] for row in rows}


@pytest.mark.parametrize("check", CHECKS)
def test_promise(check: str, results: dict[str, str]) -> None:
    assert not results[check], results[check]


HOST_READ = """
import ctypes, faulthandler, torch
faulthandler.enable()
values = torch.arange(4.0, device="cuda:1")
print(values.cpu().numpy().tolist(), flush=True)
ctypes.string_at(values.data_ptr(), 4)
"""


def test_host_read_of_device_memory_ends_the_process(tmp_path: Path) -> None:
    """The line that reads is on stderr and in the report, which the process's death leaves."""
    script, folder = tmp_path / "reads.py", tmp_path / "report"
    script.write_text(HOST_READ)
    folder.mkdir()
    done = child([str(script)], Emulation(report=folder))
    assert done.stdout == "[0.0, 1.0, 2.0, 3.0]\n"
    assert done.returncode == -11
    assert "the host read memory of cuda:1" in done.stderr
    [found] = report.read(folder)
    [finding] = found.findings
    assert finding.kind == "host_read"
    assert any("reads.py:6 in <module>" in line for line in finding.here)
    assert found.counts == {}


ROCM = """
import torch
print(torch.version.hip is not None, torch.version.cuda, torch.cuda.get_device_name())
print(torch.cuda.get_device_properties(0).gcnArchName, torch.cuda.device_count())
torch.ones(3, device="cuda:15").sum().item()
try:
    torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    print(str(error)[:18])
"""


def test_an_amd_gpu_is_named_as_rocm_names_it(tmp_path: Path) -> None:
    """Sixteen devices; the process leaves its counts, with the line of its host sync."""
    script, folder = tmp_path / "rocm.py", tmp_path / "report"
    script.write_text(ROCM)
    folder.mkdir()
    done = child([str(script)], Emulation(devices=16, gpu="MI300X", report=folder))
    assert done.stdout.splitlines() == [
        "True None AMD Instinct MI300X",
        "gfx942:sramecc+:xnack- 16",
        "HIP out of memory.",
    ], done.stderr
    [found] = report.read(folder)
    assert found.counts["syncs"] == 1
    [line] = found.counts["sync_at"]
    assert "rocm.py:5" in line


def test_emulation_refuses_what_it_has_not() -> None:
    with pytest.raises(ValueError, match="17 devices: the emulator has 1 to 16"):
        Emulation(devices=17)
    with pytest.raises(ValueError, match="no GPU is named 'B7': choose one of H100"):
        Emulation(gpu="B7")
    assert Emulation(gpu="T4").environment()["EMULATED_CUDA_BYTES"] == str(GPUS["T4"].memory)


def test_unknown_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "version", lambda _: "1.0.0")
    assert build.why_not() == "the emulator knows torch 2.13; torch 1.0.0 is installed"
    with pytest.raises(build.CannotEmulateError, match=r"torch 1\.0\.0"):
        build.library()
