"""How many ranks `samecurve run` starts and on what, what they find in their environment, and what
is noticed of a script that ignores its rank.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import nvml
from commands import command
from samecurve.core.planning.machine import Device
from samecurve.errors import UserError
from samecurve.launch.script.misuse import verdict
from samecurve.launch.script.placement import lay_out, rank_environments, settings
from samecurve.launch.script.requirements import Source, file_of_module, read_source
from samecurve.probe import Gpus

SCRIPTS = Path(__file__).with_name("scripts")
GPUS = Gpus(
    "NVIDIA",
    tuple(
        Device(kind="cuda", index=index, name="NVIDIA H200", memory=150 << 30) for index in range(4)
    ),
    "CUDA_VISIBLE_DEVICES",
)
CARDS = Gpus(
    "AMD",
    tuple(
        Device(kind="cuda", index=index, name="AMD gfx942", memory=192 << 30) for index in range(2)
    ),
    "HIP_VISIBLE_DEVICES",
)


def test_devices_and_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lay_out(GPUS, gpus=None, nproc=None, jax=False).processes == 4
    assert (
        "4 ranks, one for each of 4 x NVIDIA H200 (150.0 GiB)"
        in lay_out(GPUS, gpus=None, nproc=None, jax=False).why
    )
    assert lay_out(GPUS, gpus=None, nproc=None, jax=True).processes == 1  # jax drives all of them
    assert lay_out(GPUS, gpus=None, nproc=2, jax=True).processes == 2
    assert "if each takes one, 3 stay idle" in lay_out(GPUS, gpus=None, nproc=1, jax=False).why
    assert lay_out(GPUS, gpus="3,1", nproc=None, jax=False).visible == "3,1"
    assert "of 4 visible" in lay_out(GPUS, gpus="3,1", nproc=None, jax=False).why
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,5,7")
    assert lay_out(GPUS, gpus="3,1", nproc=None, jax=False).visible == "7,GPU-b"
    for gpus, nproc, says in (
        ("0,4", None, "GPU 4 does not exist"),
        ("0,0", None, "twice"),
        ("x", None, "GPU x"),
        ("", None, "names no GPU"),
        ("0", 2, "both say"),
        (None, 5, "NCCL refuses two ranks"),
    ):
        with pytest.raises(UserError, match=says):
            lay_out(GPUS, gpus=gpus, nproc=nproc, jax=False)


def test_what_each_platform_needs_is_set_and_what_the_user_set_stays() -> None:
    nvidia, kept = settings(
        lay_out(GPUS, gpus="0,1", nproc=None, jax=False), {"OMP_NUM_THREADS": "3"}
    )
    assert kept == ["OMP_NUM_THREADS=3"]
    assert nvidia["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert nvidia["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert (
        "PYTORCH_ALLOC_CONF"
        not in settings(
            lay_out(GPUS, gpus=None, nproc=None, jax=False), {"PYTORCH_CUDA_ALLOC_CONF": "x"}
        )[0]
    )
    amd, _ = settings(lay_out(CARDS, gpus="1", nproc=None, jax=False), {})
    assert {name: amd[name] for name in amd if name.startswith("H")} == {
        "HSA_NO_SCRATCH_RECLAIM": "1",
        "HSA_ENABLE_SDMA": "1",
        "HSA_FORCE_FINE_GRAIN_PCIE": "1",
        "HIP_VISIBLE_DEVICES": "1",
    }
    assert {
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
    } <= set(rank_environments(2, 1, restart=0, max_restarts=0)[1])


def test_gpus_in_use() -> None:
    """By the process ids that the driver lists."""
    assert "all 2 ranks use GPU 0" in str(verdict([{1, 11}, {2}], [{11, 2, 99}, set()]))
    assert 'set_device(int(os.environ["LOCAL_RANK"]))' in str(verdict([{1}, {2}], [{1, 2}, set()]))
    assert verdict([{1}, {2}], [{1, 2}, {2}]) == ""
    assert "uses GPU 1 of 2" in str(verdict([{1}], [set(), {1}]))
    assert verdict([{1}, {2}], [{1}, set()]) is None  # the other one has not begun
    assert verdict([{1}], [{77}, set()]) is None  # a container's ids are not the driver's


def test_what_a_source_says_of_itself(tmp_path: Path) -> None:
    assert read_source(SCRIPTS / "local_rank.py") == Source("--local_rank", False)
    assert read_source(SCRIPTS / "ddp.py") == Source()
    for text, jax in (
        ("import jax", True),
        ("from flax import nnx", True),
        ("import jax, torch", False),
        ("import jax\nprint(", False),
        ("import jaxtyping", False),
    ):
        (tmp_path / "a.py").write_text(text)
        assert read_source(tmp_path / "a.py").jax is jax
    assert file_of_module("json.tool") == Path(json.__file__).with_name("tool.py")
    assert str(file_of_module("pytest")).endswith("pytest/__main__.py")
    assert file_of_module("json.tool.none") is file_of_module("nowhere_to_be_found") is None


WATCHING = """
import os, subprocess, sys, time
from samecurve.launch.script.misuse import Notices
from samecurve.probe import nvidia
children = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
try:
    with open(os.environ["NVML_PROCESSES"], "w") as processes:
        for gpu, child in zip(sys.argv[1], children):
            processes.write(f"{gpu} {child.pid}\\n")
    holders = lambda: nvidia.processes_on_devices(os.environ)
    notices = Notices(2, port=1, gpus=2, holders=holders, say=print, long=0.3, every=0.1)
    until = time.monotonic() + 1
    while time.monotonic() < until:
        notices.tick(dict(enumerate(child.pid for child in children)))
    notices.ended([{"joined": False}, {"joined": False}])
finally:
    for child in children:
        child.kill()
"""


@pytest.mark.parametrize(("gpus", "shared"), [("11", True), ("01", False)])
def test_ranks_on_one_gpu_are_told_once(
    *, gpus: str, shared: bool, library: Path, tmp_path: Path
) -> None:
    """Read from the driver's library, while they live; and that they have not met, once in all."""
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(library),
        "NVML_PROCESSES": str(tmp_path / "processes"),
        "CUDA_VISIBLE_DEVICES": "0,1",
    }
    said = subprocess.run(
        [sys.executable, "-c", WATCHING, gpus],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert sum("all 2 ranks use GPU 1" in line for line in said) == shared
    assert sum("has joined a process group" in line for line in said) == 1
    assert len(said) == 1 + shared


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nvml.library(tmp_path_factory.mktemp("nvml"), 3)


def test_one_rank_for_each_gpu(library: Path, tmp_path: Path) -> None:
    """As CUDA_VISIBLE_DEVICES leaves them: --gpus counts among those."""
    script = tmp_path / "see.py"
    script.write_text(
        "import os\nprint(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['LOCAL_RANK'],"
        " os.environ['CUDA_DEVICE_ORDER'])\n"
    )
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library), "CUDA_VISIBLE_DEVICES": "2,0"}
    for flags, expected in (([], ["2,0 0", "2,0 1"]), (["--gpus", "1"], ["0 0"])):
        done = subprocess.run(
            command("run", *flags, script),
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert sorted(
            line.removeprefix("[rank 0] ").removeprefix("[rank 1] ")
            for line in done.stdout.splitlines()
        ) == [f"{each} PCI_BUS_ID" for each in expected]
        assert "NVIDIA H200 no. 0" in done.stderr
    assert len(list((tmp_path / "runs").glob("see-*/logs/rank-0.log"))) == 2


def test_a_launcher_for_one_make_of_gpu(library: Path, tmp_path: Path) -> None:
    """Says so where there is none, instead of training on something else."""
    home = Path(__file__).parents[2] / "scripts"
    plain = {**os.environ, "PYTHON": sys.executable}
    gpus = {**plain, "LD_LIBRARY_PATH": str(library)}
    script = tmp_path / "see.py"
    script.write_text("import os\nprint(os.environ['WORLD_SIZE'])\n")
    for make in ("nvidia", "amd"):
        launcher = home / f"run_{make}_all.sh"
        bare = {**plain, "PYTHON": "no-such-python"}
        for environment, code, says in (
            (plain, 1, "`samecurve bench --suite cpu` needs none"),
            (bare, 2, f"PYTHON=.venv/bin/python {launcher}"),
        ):
            done = subprocess.run(
                [launcher], env=environment, capture_output=True, text=True, check=False
            )
            assert (done.returncode, done.stdout) == (code, "")
            assert says in done.stderr
    for make, environment, code, says in (
        ("nvidia", plain, 1, "no NVIDIA GPU found (no GPU at all)"),
        ("amd", gpus, 1, "no AMD GPU found (NVIDIA)"),
        ("nvidia", gpus, 0, "3 ranks, one for each of"),
        ("nvidia", {**gpus, "CUDA_VISIBLE_DEVICES": "7"}, 2, "names 7"),
    ):
        done = subprocess.run(
            [home / f"run_{make}_all.sh", script],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stderr
        assert says in done.stderr
        assert done.stdout.count("] 3\n") == (0 if code else 3)
