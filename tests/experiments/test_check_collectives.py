"""The collectives of `samecurve check`: real processes, among them some that hang or break."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest

import nvml
import samecurve
from commands import until
from samecurve.core.planning.machine import Device
from samecurve_products.doctor.collectives import (
    JOB,
    CollectiveResult,
    CollectiveTests,
    rounds,
)
from samecurve_products.doctor.trial import Trials
from warm_commands import template

MODULES = ("torch", "torch._dynamo", "samecurve_products.doctor.check_job", "check_ranks")
PATH = os.pathsep.join([str(Path(samecurve.__file__).parents[1]), str(Path(__file__).parents[1])])
CPU = tuple(Device(kind="cpu", index=index, name="CPU", memory=1 << 30) for index in range(3))
GPUS = tuple(Device(kind="cuda", index=index, name="H200", memory=1 << 37) for index in range(4))


@contextmanager
def collective_tests(
    home: Path, limit: float, job: str = JOB, variables: Mapping[str, str] | None = None
) -> Iterator[CollectiveTests]:
    """When the block is over, no process of it is left."""
    template()  # the session's own, which stays
    before = set(psutil.Process().children(recursive=True))
    environment = {**os.environ, "PYTHONPATH": PATH, **(variables or {})}
    with patch.dict(os.environ, PYTHONPATH=PATH), Trials(home, environment, MODULES) as trials:
        yield CollectiveTests(trials, environment, limit=limit, say=print, job=job)
    after = set(psutil.Process().children(recursive=True)) - before
    assert not [process for process in after if process.is_running()]


def checked(home: Path, fault: str, count: int = 2, **variables: str) -> CollectiveResult:
    """Ranks that only tell what ranks on GPUs would."""
    variables["CHECK_FAULT"] = fault
    with collective_tests(home, 2, "check_ranks:as_gpus", variables) as tests:
        return tests.check(GPUS[:count])


def test_two_cpu_ranks_exchange_values(tmp_path: Path) -> None:
    with collective_tests(tmp_path, 60) as tests:
        result = tests.check(CPU[:2])
    (check,) = result.checks
    assert (check.status, check.remedy, result.backend) == ("PASS", "", "gloo")
    for words in ("2 CPU ranks: all-reduce", "B/s, broadcast", "all-gather", "all results right"):
        assert words in check.figure


def test_a_rank_that_never_joins_is_named_in_time(tmp_path: Path) -> None:
    with collective_tests(tmp_path, 3, "check_ranks:second_never_joins") as tests:
        result = tests.check(CPU[:2])
    (check,) = result.checks
    assert (check.status, result.backend) == ("FAIL", "")
    assert check.figure == (
        "2 CPU ranks: CPU rank 1 did not begin to join (CPU rank 0 and CPU rank 1)"
    )


@pytest.mark.long
def test_a_rank_that_breaks_is_quoted(tmp_path: Path) -> None:
    """The other one, which waits for it, does not wait for the limit."""
    with collective_tests(tmp_path, 60, "check_ranks:second_breaks") as tests:
        began = time.monotonic()
        (check,) = tests.check(CPU[:2]).checks
        assert any("no kernel image" in line for line in tests.logs)
        assert time.monotonic() - began < 20
    assert "CPU rank 1 failed in started: RuntimeError: no kernel image" in check.figure


def test_without_p2p_where_that_helps(tmp_path: Path) -> None:
    result = checked(tmp_path, "p2p")
    nccl, gloo = result.checks
    assert (nccl.status, gloo.status) == ("FAIL", "PASS")
    assert "GPUs 0 and 1: all ranks hang in all-reduce (GPU 0 and GPU 1)" in nccl.figure
    assert "With NCCL_P2P_DISABLE=1 all works" in nccl.figure
    assert nccl.remedy.startswith("export NCCL_P2P_DISABLE=1")
    assert (result.variables, result.backend) == ({"NCCL_P2P_DISABLE": "1"}, "nccl")


@pytest.mark.long
def test_the_pairs_that_fail_are_named(tmp_path: Path) -> None:
    """GPU 2 hangs with each other; Gloo goes around it, and the remedy says so."""
    result = checked(tmp_path, "card", 4)
    nccl = result.checks[0]
    assert nccl.status == "FAIL"
    assert nccl.figure.startswith("GPUs 0, 1, 2 and 3: GPU 2 hung in all-reduce; pair by pair")
    assert "fail: GPU 0 and GPU 2, GPU 1 and GPU 2, GPU 2 and GPU 3; the other 3 pairs" in (
        nccl.figure
    )
    assert "NCCL_P2P_DISABLE=1 does not help" in nccl.figure
    assert nccl.remedy.startswith("--sync-backend cpu works")
    assert result.backend == "gloo"


@pytest.mark.long
def test_gloo_alone_is_broken(tmp_path: Path) -> None:
    """NCCL is enough between GPUs."""
    result = checked(tmp_path, "gloo")
    assert [check.status for check in result.checks] == ["PASS", "WARN"]
    assert result.backend == "nccl"


def test_slow_and_wrong_ones(tmp_path: Path) -> None:
    slow = checked(tmp_path, "slow")
    assert slow.checks[0].status == "WARN"
    assert "slower than Gloo's 1GB/s" in slow.checks[0].figure
    assert slow.variables == {"NCCL_P2P_DISABLE": "1"}
    already = checked(tmp_path, "slow", NCCL_P2P_DISABLE="1")
    assert [check.status for check in already.checks] == ["PASS", "PASS"]
    wrong = checked(tmp_path, "wrong")
    assert "the gradients of a DDP step are wrong by 0.5" in wrong.checks[0].figure


def test_one_gpu_alone(tmp_path: Path) -> None:
    result = checked(tmp_path, "", 1)
    assert [(check.name, check.status) for check in result.checks] == [("GPU step", "PASS")]
    assert "GPU 0 computes" in result.checks[0].figure


def test_rounds_have_each_pair_once() -> None:
    for count in (2, 3, 8):
        pairs = [pair for each in rounds(count) for pair in each]
        assert len(pairs) == len(set(pairs)) == count * (count - 1) // 2
        for each in rounds(count):
            assert len({rank for pair in each for rank in pair}) == 2 * len(each)


ON_GPUS = """
import sys
from functools import partial
from samecurve.cli.main import main
from samecurve_products.doctor import run
facts = {"version": "2.13.0", "cuda": "13.0", "hip": None, "available": True, "nccl": "2.28.9",
         "names": ["H200", "H200"], "arches": [], "devices": "[CudaDevice(id=0)]", "gpus": 2}
run._facts = lambda *_: facts
run.CollectiveTests = partial(run.CollectiveTests, job="check_ranks:as_gpus")
sys.argv = ["samecurve", "check", "--limit", "3"]
main()
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "code", "nccl", "line"),
    [
        ("", 0, "PASS   NCCL collectives  GPUs 0 and 1: all-reduce 100GB/s", "samecurve train"),
        ("p2p", 1, "FAIL   NCCL collectives", "NCCL_P2P_DISABLE=1 samecurve train"),
    ],
)
def test_the_command_on_two_gpus(
    fault: str, code: int, nccl: str, line: str, tmp_path: Path
) -> None:
    """Stand-ins for the driver, for what torch tells and for the ranks; all else is real."""
    library = nvml.library(tmp_path)
    nvml.write_gpus(tmp_path / "gpus", [nvml.Gpu(), nvml.Gpu()])
    variables = {"NVML_GPUS": str(tmp_path / "gpus"), "LD_LIBRARY_PATH": str(library)}
    done = subprocess.run(
        [sys.executable, "-c", nvml.ENGINES + ON_GPUS],
        cwd=tmp_path,
        env={**os.environ, **variables, "PYTHONPATH": PATH, "CHECK_FAULT": fault},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "PASS   GPUs              Detected 2 GPUs: NVIDIA H200\n" in done.stdout
    assert "it sees 2 of 2 GPUs" in done.stdout
    assert nccl in done.stdout
    assert done.stdout.splitlines()[-1].startswith(f"next   {line} -f ")
    assert done.stdout.splitlines()[-1].endswith("--devices auto")


HANGING = """
import sys
from functools import partial
from samecurve.cli.main import main
from samecurve_products.doctor import run
run.CollectiveTests = partial(run.CollectiveTests, job="check_ranks:second_never_joins")
sys.argv = ["samecurve", "check", "--limit", "{limit}"]
main()
"""


@contextmanager
def hanging_check(home: Path, limit: int) -> Iterator[subprocess.Popen[str]]:
    """`samecurve check` of whose ranks one never joins."""
    environment = {**os.environ, "PYTHONPATH": PATH}
    with subprocess.Popen(
        [sys.executable, "-c", HANGING.format(limit=limit)],
        cwd=home,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.long
def test_the_command_ends_within_its_limit(tmp_path: Path) -> None:
    with hanging_check(tmp_path, 4) as process:
        text = process.communicate(timeout=240)[0]
    assert process.returncode == 1
    assert "FAIL   Gloo collectives  2 CPU ranks: CPU rank 1 did not begin to join" in text
    assert "next   samecurve check, once the FAIL lines are mended" in text


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_an_interrupted_check(number: int, tmp_path: Path) -> None:
    """A rank that hangs and one that waits for it, when the command is ended."""
    with hanging_check(tmp_path, 600) as process:
        assert process.stdout
        for line in process.stdout:
            if "trying 2 CPU ranks" in line:
                break
        started = until(lambda: _ranks_of(process.pid))
        os.kill(process.pid, number)
        process.wait(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else process.returncode)
    assert process.returncode != 0
    until(lambda: not any(_lives(pid) for pid in started), timeout=20)


def _ranks_of(pid: int) -> list[int]:
    """The processes of a check, once both ranks are among them: a server and two forked ranks."""
    children = [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return children if len(children) >= 3 else []


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
