"""The emulated NCCL and Gloo: what they compute, refuse, and do when ranks disagree."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from emulated import why_skipped

from samecurve_products.rehearse.emulated_cuda import build
from samecurve_products.rehearse.emulated_cuda.machine import Emulation

CHECKS = Path(__file__).with_name("collective_checks.py")


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    if reason := why_skipped():
        pytest.skip(reason)
    build.library()


@contextmanager
def ranks(what: str, world: int, meeting: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """The processes of a job that calls collectives. None is left afterwards.

    meeting: a file that is not there yet, where they meet
    """
    environment = {
        **os.environ,
        **Emulation(devices=world).environment(),
        "WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(CHECKS), what, str(meeting)],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(("what", "world"), [("nccl", 3), ("gloo", 2)])
def test_each_collective_computes_and_refuses_as_on_gpus(
    what: str, world: int, tmp_path: Path
) -> None:
    """Every operation equals numpy's; what is late is late; an abort ends what hangs."""
    with ranks(what, world, tmp_path / "meeting") as processes:
        for process in processes:
            out, err = process.communicate(timeout=120)
            assert process.returncode == 0, out + err


@pytest.mark.long
def test_each_collective_computes_on_two_ranks(tmp_path: Path) -> None:
    """Beside the 3 ranks of the short test: pairs, where sums have one order only."""
    test_each_collective_computes_and_refuses_as_on_gpus("nccl", 2, tmp_path)


def test_ranks_that_disagree_hang_until_the_watchdog_ends_them(tmp_path: Path) -> None:
    """The host goes on until it synchronizes; then torch's watchdog says which collective it is."""
    began = time.monotonic()
    with ranks("disagree", 2, tmp_path / "meeting") as processes:
        for rank, process in enumerate(processes):
            out, err = process.communicate(timeout=60)
            assert "the host goes on" in out, err
            assert process.returncode == -6
            text = (
                f"[Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, "
                f"OpType=ALLREDUCE, NumelIn={3 + rank}, NumelOut={3 + rank}, Timeout(ms)=2000)"
            )
            assert text in err
    assert time.monotonic() - began > 2
