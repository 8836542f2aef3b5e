"""Golden losses are those of emulated GPUs and of CPU ranks; a run that changes them fails here.

`python tests/emulated_cuda/run.py python -m benchmarks.golden --write` renews them on purpose.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.golden import SAME, allowed, golden_losses
from benchmarks.golden_cases import CASES
from emulated import only_emulated

from samecurve_products.rehearse.emulated_cuda.machine import Emulation

ROOT = Path(__file__).parents[2]


def check(home: Path, names: list[str]) -> None:
    """The cases, trained on emulated GPUs and on CPU ranks, have their golden losses."""
    answer = home / "golden.json"
    asked = ("--write", "--cases", ",".join(names), "--out", answer)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.golden", *asked],
        cwd=ROOT,
        env={**os.environ, **Emulation(devices=2).environment()},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert not done.returncode, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    found = json.loads(answer.read_text())["cases"]
    assert list(found) == names
    for name in names:
        golden = golden_losses()[name]
        for precision, wanted in golden.items():
            near = SAME if precision == "f64" else allowed(golden, precision)
            losses = found[name]["losses"][precision]
            assert losses == pytest.approx(wanted, rel=near, abs=0), (name, precision)


@only_emulated
def test_golden_losses_are_those_of_emulated_gpus_and_of_cpu_ranks(tmp_path: Path) -> None:
    """--write itself holds that both agree in f64 to 1e-12."""
    check(tmp_path, ["operations"])


@only_emulated
@pytest.mark.long  # ten cases, each trained three times
def test_all_golden_losses(tmp_path: Path) -> None:
    check(tmp_path, list(CASES))
