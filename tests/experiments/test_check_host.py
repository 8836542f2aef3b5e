"""`samecurve check` of the host and of the libraries, and how its answers are shown."""

import json
import os
import subprocess
import sys
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from commands import refused, samecurve
from samecurve.core.planning.machine import NVIDIA, Device
from samecurve.probe import Gpus, engines
from samecurve_products.doctor import Check, failed, output, passed, software
from samecurve_products.doctor.software import check_jax, check_python, check_torch
from samecurve_products.doctor.system import Host, check_system

GPUS = Gpus(
    NVIDIA,
    tuple(
        Device(kind="cuda", index=index, name="H200", memory=1 << 37, capability="9.0")
        for index in range(2)
    ),
    "CUDA_VISIBLE_DEVICES",
)
NO_GPUS = Gpus("", (), "")
TORCH: dict[str, Any] = {
    "version": "2.13.0",
    "cuda": "13.0",
    "hip": None,
    "available": True,
    "nccl": "2.28.9",
    "names": ["H200", "H200"],
    "arches": ["sm_80", "sm_90", "sm_120"],
}


def host(home: Path, **values: Any) -> Host:
    return Host(save_dir=home / "runs", ranks=2, root=home, **values)


def statuses(checks: list[Check]) -> dict[str, str]:
    return {check.name: check.status for check in checks}


def test_a_host_with_nothing_wrong(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    lines = ["1 0 8:1 / / rw - ext4 sda rw", f"2 1 0:9 / {tmp_path} rw shared:1 - nfs4 a:/b rw"]
    (tmp_path / "proc/self/mountinfo").write_text("\n".join(lines))
    checks = check_system(host(tmp_path, cores=8, shared_memory=tmp_path, name="localhost"))
    runs = {"run directory", "file system of runs"}
    assert all(check.status == "PASS" for check in checks if check.name not in runs)
    by_name = {check.name: check.figure for check in checks}
    assert by_name["CPU cores"].endswith(": 4 each")
    assert f"free in {tmp_path} (nfs4)" in by_name["run directory"]
    assert f"{tmp_path} is on a network file system (nfs4)" in by_name["file system of runs"]
    assert statuses(checks)["file system of runs"] == "WARN"
    assert list(tmp_path.glob(".samecurve-check-*")) == []


def test_what_is_wrong_with_a_host(tmp_path: Path) -> None:
    """A name without an address, too few cores, a clock that is behind, a wrong variable."""
    checks = check_system(
        host(
            tmp_path,
            cores=1,
            name="no-such-host.invalid",
            time=1e9,
            environment={"NCCL_SOCKET_IFNAME": "=ib7", "GLOO_SOCKET_IFNAME": "lo"},
        )
    )
    wrong = {check.name: check for check in checks if check.status != "PASS"}
    for name, words in {
        "CPU cores": "1 core for 2 CPU ranks",
        "host name": "no-such-host.invalid, this host's own name, has no address",
        "clock": "2001-09-09 01:46:40 UTC, which is before",
        "network variable": "NCCL_SOCKET_IFNAME==ib7 names no network interface",
    }.items():
        assert words in wrong[name].figure
    assert wrong["network variable"].status == "FAIL"


def skip_without_mounts() -> None:
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespaces for this user")


LIMITS = """
import json, sys
from dataclasses import astuple
from pathlib import Path
from samecurve_products.doctor.system import Host, check_system
home = Path(sys.argv[1])
for shm, runs in (("full", "locked"), ("small", "little")):
    host = Host(save_dir=home / runs / "runs", ranks=2, gpus=2, root=home, shared_memory=home / shm)
    print(json.dumps([astuple(check) for check in check_system(host)]))
"""


def test_limits_and_full_places(tmp_path: Path) -> None:
    """Real ones: file systems of a few MiB, full, small and read-only; low limits."""
    skip_without_mounts()
    for name in ("full", "small", "locked", "little", "sys/class/infiniband/mlx5_0"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/pids.max").write_text("100\n")
    script = (
        f"cd {tmp_path} && mount -t tmpfs -o size=16m none full && mount -t tmpfs -o size=64m none"
        " small && mount -t tmpfs -o size=64m none little && mount -t tmpfs -o ro none locked"
        " && head -c 15m /dev/zero > full/used && ulimit -n 200 && ulimit -l 64"
        ' && exec "$0" "$@"'
    )
    done = subprocess.run(
        ["unshare", "-m", "bash", "-c", script, sys.executable, "-c", LIMITS, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, second = ([Check(*one) for one in json.loads(line)] for line in done.stdout.splitlines())
    wrong = {check.name: check for check in first if check.status != "PASS"}
    assert statuses(list(wrong.values())) == {
        "shared memory": "FAIL",
        "open files": "FAIL",
        "processes": "WARN",
        "locked memory": "WARN",
        "run directory": "FAIL",
    }
    assert "1.0 MiB free of 16.0 MiB" in wrong["shared memory"].figure
    assert "200 for each process (ulimit -n), and 200 at most" in wrong["open files"].figure
    assert "nofile" in wrong["open files"].remedy
    assert "64.0 KiB: too little for NCCL over mlx5_0" in wrong["locked memory"].figure
    assert "its file system is read-only" in wrong["run directory"].figure
    after = {check.name: f"{check.status} {check.figure}" for check in second}
    assert after["shared memory"].startswith("WARN 64.0 MiB free")
    assert after["run directory"].startswith("FAIL 64.0 MiB free")


def test_libraries_beside_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    build = engines.TorchBuild("2.13.0", "13.0", None)
    monkeypatch.setattr(engines, "torch_build", lambda: build)
    checks = check_torch(TORCH, GPUS)
    assert [astuple(check) for check in checks] == [
        ("torch", "PASS", "2.13.0, built for CUDA 13.0; it sees 2 of 2 GPUs", ""),
        ("NCCL", "PASS", "2.28.9 (torch.cuda.nccl.version())", ""),
    ]
    unseen = {**TORCH, "available": False, "error": "CUDA unknown error"}
    (silent,) = check_torch(unseen, GPUS)
    assert "it finds no GPU, and the driver shows 2: CUDA unknown error" in silent.figure
    monkeypatch.setattr(software, "cuda_of_driver", lambda: "12.4")
    (old,) = check_torch(unseen, GPUS)
    assert "runs CUDA 12.4 at most" in old.figure
    assert "built for CUDA 12 " in old.remedy
    fewer = {**TORCH, "names": ["H200"], "arches": ["sm_50", "sm_120", "compute_120"]}
    assert [check.status for check in check_torch(fewer, GPUS)] == ["FAIL", "FAIL", "PASS"]
    later = {**TORCH, "arches": ["compute_80"], "nccl": ""}
    assert statuses(check_torch(later, GPUS)) == {"torch": "PASS", "NCCL": "FAIL"}
    (broken,) = check_torch({"error": "OSError: libtorch.so"}, NO_GPUS)
    assert (broken.status, broken.name) == ("FAIL", "torch")
    monkeypatch.setattr(
        engines, "torch_build", lambda: engines.TorchBuild("2.13.0+cpu", None, None)
    )
    (cpu,) = check_torch({**TORCH, "version": "2.13.0+cpu", "cuda": None}, GPUS)
    assert cpu.status == "FAIL"
    assert cpu.figure.startswith("this machine has GPUs, and the installed torch 2.13.0+cpu is")
    assert "install torch==2.13.0" in cpu.remedy


def test_jax_and_python() -> None:
    assert check_jax(None, NO_GPUS)[0].figure.startswith("not installed; only --engine jax")
    devices = {"version": "0.10.2", "devices": "[CpuDevice(id=0)]", "gpus": 0}
    (plain,) = check_jax(devices, NO_GPUS)
    assert plain.status == "PASS"
    assert "jax.devices() is [CpuDevice(id=0)]" in plain.figure
    assert check_jax(devices, GPUS)[0].status == "WARN"
    assert check_jax({"error": "RuntimeError: no"}, NO_GPUS)[0].status == "WARN"
    assert [check_python(version).status for version in ((3, 11), (3, 99))] == ["PASS", "WARN"]


def test_a_report_has_what_matters_and_no_secret() -> None:
    """Secrets are known by the name of their variable, and by their own form."""
    environment = {
        "NCCL_DEBUG": "INFO",
        "WANDB_API_KEY": "0123456789abcdef",
        "HF_TOKEN": "hf_abcdefghijklmnop",
        "SAMECURVE_CACHE": "https://ada:geheim@example.org/x",
        "TORCH_HOME": "/home/ada/torch",
        "NCCL_NET_PLUGIN": "sk-0123456789abcdefghij",
        "SLURM_JOB_USER": "ada",
        "SLURM_JOB_ID": "77",
        "EDITOR": "vi",
    }
    checks = [passed("torch", "2.13.0"), failed("run directory", "/home/ada/runs: full", "free")]
    checks.insert(1, passed("host name", "lovelace is 127.0.0.1"))  # left out, and not counted
    text = output.report_of(checks, environment, home=Path("/home/ada"), logs=["NCCL WARN x"])
    assert text.splitlines()[0] == text.splitlines()[-1] == "```"
    for shown in ("NCCL_DEBUG=INFO", "SLURM_JOB_ID=77", "TORCH_HOME=~/torch", "~/runs: full"):
        assert shown in text
    for hidden in ("0123456789", "abcdefghij", "geheim", "ada", "EDITOR", "lovelace"):
        assert hidden not in text
    assert "  2 FAIL   run directory" in text
    assert "\n2 checks: 1 PASS, 0 WARN, 1 FAIL\n" in text
    assert "  NCCL WARN x\n```" in text
    assert text.count("[hidden]") == 4


def test_the_command(tmp_path: Path) -> None:
    """On a machine as it is: a JSON of the checks, each with a remedy unless it is PASS."""
    done = samecurve("check", "--json", "--devices", "cpu", cwd=tmp_path, code=None)
    checks = [Check(**value) for value in json.loads(done.stdout)["checks"]]
    assert done.returncode == int(any(check.status == "FAIL" for check in checks))
    assert [check.name for check in checks if bool(check.remedy) == (check.status == "PASS")] == []
    by_name = {check.name: check for check in checks}
    assert by_name["Gloo collectives"].status == "PASS"
    assert by_name["NCCL collectives"].figure.startswith("not tested")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--no-such"], "no such option"),
        (["--gpus", "9"], "GPU 9 does not exist"),
        (["--devices", "cpu:0"], "cpu:0: 0 CPU ranks"),
        (["--devices", "many"], "'many' is neither auto"),
        (["--json", "--report"], "leave one out"),
        (["--gpus", "0", "--devices", "cpu"], "contradict each other"),
        (["--limit", "0"], "0.0 is not in the range"),
        (["extra"], "unexpected extra argument"),
    ],
)
def test_bad_input(
    words: list[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    text = refused(monkeypatch, capsys, "check", *words, cwd=tmp_path)
    assert says.lower() in text.lower()


@pytest.mark.long
def test_the_command_on_a_narrow_machine(tmp_path: Path) -> None:
    """A full /dev/shm, a run directory that is read-only, few open files: the ranks work still."""
    skip_without_mounts()
    (tmp_path / "disk").mkdir()
    script = (
        "mount -t tmpfs -o size=16m none /dev/shm && head -c 15m /dev/zero > /dev/shm/used"
        f" && mount -t tmpfs -o ro none {tmp_path}/disk && ulimit -n 300"
        ' && exec "$0" -m samecurve check --save-dir disk/runs'
    )
    done = subprocess.run(
        ["unshare", "-m", "bash", "-c", script, sys.executable],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    for words in (
        "FAIL   shared memory     1.0 MiB free of 16.0 MiB in /dev/shm",
        "WARN   open files        300 for each process (ulimit -n), and 300 at most",
        f"FAIL   run directory     {tmp_path}/disk: its file system is read-only",
        "PASS   Gloo collectives  2 CPU ranks",
        "next   samecurve check, once the FAIL lines are mended",
    ):
        assert words in done.stdout


@pytest.mark.long
def test_the_report_and_the_script(tmp_path: Path) -> None:
    """As they are started: each ends with the line to try next, or with the block's own end."""
    script = Path(__file__).parents[2] / "scripts/check_multi_gpu.py"
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert "Detected 0 GPUs" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("next   samecurve train -f ")
    environment = {**os.environ, "HF_TOKEN": "hf_abcdefghijklmnop"}
    report = subprocess.run(
        [sys.executable, "-m", "samecurve", "check", "--report", "--devices", "cpu:3"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "3 CPU ranks: all-reduce" in report
    assert "HF_TOKEN=[hidden]" in report
    assert report.startswith("```\nsamecurve check, ")
