"""Whether this folder's tests can run here."""

import os
from pathlib import Path

import pytest

from samecurve_products.rehearse.emulated_cuda import build


def why_skipped() -> str:
    """Why this folder's tests skip here; '' where they run."""
    if Path("/dev/nvidia0").exists():
        return "this machine has a GPU: tests on it need no emulator"
    return build.why_not() or ""


only_emulated = pytest.mark.skipif(bool(why_skipped()), reason=why_skipped())
# what a developer hides of real GPUs would hide emulated ones too
for _variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
    if not why_skipped():
        os.environ.pop(_variable, None)
