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


WAYS_TO_HOST = """
import ctypes, faulthandler, json, os, sys
import numpy as np
import torch
from torch.utils import dlpack
faulthandler.enable()

def address(): return ctypes.string_at(values.data_ptr(), 4)
def ctypes_array(): return (ctypes.c_float * 4).from_address(values.data_ptr())[0]
def write(): return ctypes.memset(values.data_ptr(), 0, 4)
def numpy(): return values.numpy()
def array(): return np.asarray(values)
def buffer(): return memoryview(values)
def dlpack_to_numpy(): return np.from_dlpack(values)
def dlpack_to_torch(): return torch.from_dlpack(values).tolist()
def dlpack_on_a_stream():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        taken = torch.from_dlpack(values)  # which waits for the default stream
        assert stream == torch.cuda.ExternalStream(stream.cuda_stream)
        return taken.tolist()
def capsule_to_torch(): return dlpack.from_dlpack(dlpack.to_dlpack(values)).tolist()
def tolist(): return values.tolist()
def cpu(): return values.cpu().numpy().tolist()
def storage(): return values.untyped_storage().cpu().tolist()[3]

for name in sys.argv[1:]:
    if not (child := os.fork()):
        try:
            torch.cuda.set_device(1)
            values = torch.arange(4.0, device="cuda:1")
            print(json.dumps(globals()[name]()), flush=True)
        except Exception as error:
            line = error.__traceback__.tb_next.tb_lineno
            print(json.dumps(f"{type(error).__name__} in line {line}"), flush=True)
        os._exit(0)
    print(json.dumps(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])), flush=True)
"""
FATAL = ("address", "ctypes_array", "write")  # nothing but the memory itself can refuse these
REFUSED = ("numpy", "array", "buffer", "dlpack_to_numpy")  # by torch or numpy
ALLOWED = ("dlpack_to_torch", "dlpack_on_a_stream", "capsule_to_torch", "tolist", "cpu", "storage")


def line_of(function: str) -> int:
    """The number of a function's line in the script above."""
    lines = WAYS_TO_HOST.splitlines()
    return next(i for i, line in enumerate(lines, 1) if line.startswith(f"def {function}("))


def test_each_way_from_device_memory_to_the_host_is_an_error_at_its_line(tmp_path: Path) -> None:
    """A line that reads is on stderr and in the report, which the process's death leaves."""
    script, folder = tmp_path / "reads.py", tmp_path / "report"
    script.write_text(WAYS_TO_HOST)
    folder.mkdir()
    done = child([str(script), *FATAL, *REFUSED, *ALLOWED], Emulation(report=folder))
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert told[:3] == [-11] * 3, done.stderr
    refused, allowed = told[3 : 3 + 2 * len(REFUSED)], told[3 + 2 * len(REFUSED) :]
    errors = dict(zip(REFUSED, refused[::2], strict=True))
    assert {name: str(error).partition(" in line ")[2] for name, error in errors.items()} == {
        name: str(line_of(name)) for name in REFUSED
    }
    assert [*allowed[::2]] == [[0.0, 1.0, 2.0, 3.0]] * 5 + [0]
    assert {*refused[1::2], *allowed[1::2]} == {0}
    assert done.stderr.count("the host read memory of cuda:1") == len(FATAL)
    dead = [process for process in report.read(folder) if process.findings]
    found = [finding for process in dead for finding in process.findings]
    assert {finding.kind for finding in found} == {"host_read"}
    places = [next(line for line in each.here if str(script) in line) for each in found]
    assert {*places} == {f"{script}:{line_of(name)} in {name}" for name in FATAL}
    assert [process.counts for process in dead] == [{}] * len(FATAL)


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
