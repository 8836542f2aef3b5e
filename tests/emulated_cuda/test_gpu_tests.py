"""All tests marked `gpu`, on emulated GPUs: those that need no kernel of a real GPU pass."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from emulated import only_emulated

from samecurve_products.rehearse.emulated_cuda.machine import Emulation

pytestmark = [pytest.mark.long, only_emulated]  # forty tests, each of several runs
ROOT = Path(__file__).parents[2]
WHY_SKIPPED = (
    *("an emulated GPU runs the CPU's kernels", "jax is installed without CUDA"),
    "torchao is not installed",
)


def test_every_test_that_needs_a_gpu_passes_or_says_why_not(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "gpu", "tests", "-q", f"--junit-xml={report}"],
        cwd=ROOT,
        env={**os.environ, **Emulation(devices=2).environment()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=3000,
        check=False,
    )
    assert not done.returncode, done.stdout[-8000:]
    cases = list(ElementTree.parse(report).iter("testcase"))
    skipped = [str(found.text) for case in cases for found in case.iter("skipped")]
    assert all(any(why in reason for why in WHY_SKIPPED) for reason in skipped), skipped
    assert len(cases) - len(skipped) >= 30
