"""A job under Ray: a rank that is killed, and the curve at the end.

RAY_PYTHON names an interpreter that has ray[train] beside what Samecurve needs (525 MB more).
"""

import os
import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from commands import assert_same_run, command, losses, steps_written, until, write_config

PYTHON = os.environ.get("RAY_PYTHON", "")


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(not PYTHON, reason="RAY_PYTHON names no interpreter with ray[train]")
def test_ray_starts_again_from_our_checkpoints(
    tmp_path: Path, corpus: Path, unbroken_run: Path
) -> None:
    config = write_config(tmp_path, corpus)
    run = tmp_path / "run"
    words = ("--gpus-per-node", "0", "--devices", "cpu:2", "--min-workers", "1")
    where = ("--python", PYTHON, "--save-dir", str(run), "--set", "train.save_every=1")
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "RAY_USAGE_STATS_ENABLED": "0"}
    with open(tmp_path / "output", "wb") as output:
        process = subprocess.Popen(
            command("submit", "ray", "-f", config, *words, *where),
            cwd=tmp_path,
            env=environment,
            stdout=output,
            stderr=output,
        )
        try:
            until(lambda: steps_written(run) > 3, 300)
            os.kill(_rank(1, str(run)), signal.SIGKILL)
            assert process.wait(400) == 0, (tmp_path / "output").read_text()[-3000:]
        finally:
            process.terminate()
    shown = (tmp_path / "output").read_text()
    assert re.search(r"resume step \d+", shown)
    assert len(losses(run)) == 60
    assert_same_run(run, unbroken_run)
    assert (run / "submit/ray").is_dir()  # and nothing of it lies elsewhere


def _rank(index: int, run: str) -> int:
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or [""]
        if words[0] == f"samecurve rank {index}" and run in words:
            return int(process.pid)
    raise AssertionError(f"rank {index} is not there")
