"""`samecurve check` of GPUs and their topology: a stand-in for the driver shows what is wrong."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

import nvml
from commands import write_config
from nvml import Gpu
from samecurve.probe.gpu_state import GpuState, counts_as_driver
from samecurve_products.doctor import topology as paths

# checks each scene that it reads, in one process
PROGRAM = """
import json, os, sys
from dataclasses import astuple
from pathlib import Path
from samecurve_products.doctor.devices import check_devices, read_gpus
from samecurve_products.doctor.topology import check_topology, read_paths
for scene in json.load(sys.stdin):
    os.environ["NVML_GPUS"] = scene["file"]
    for name, value in scene["variables"].items():
        os.environ[name] = value
    reading = read_gpus(os.environ)
    root = Path(scene["root"])
    checks = check_devices(reading, os.environ, root)
    checks += check_topology(read_paths(os.environ, len(reading.states)), reading.states, root)
    print(json.dumps([astuple(check) for check in checks]))
    for name in scene["variables"]:
        del os.environ[name]
"""
MIXED = [Gpu("NVIDIA RTX 4090", 24_564 << 20), Gpu("NVIDIA RTX 3060", 12_287 << 20)]
ODD = {
    "hot": Gpu(slowdowns=0x40 | 0x80),
    "power limit": Gpu(slowdowns=0x4),
    "errors": Gpu(errors=3),
    "prohibited": Gpu(mode=2),
    "exclusive": Gpu(mode=3),
    "narrow": Gpu(lanes=4),
    "full": Gpu(used=100_000_000_000),
    "shared": Gpu(memory=0),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nvml.library(tmp_path_factory.mktemp("nvml"))


def scene(home: Path, gpus: list[Gpu], **variables: str) -> dict[str, Any]:
    path = home / f"gpus-{len(list(home.glob('gpus-*')))}"
    nvml.write_gpus(path, gpus)
    return {"file": str(path), "variables": variables, "root": str(home)}


def checked(library: Path, scenes: list[dict[str, Any]]) -> list[list[list[str]]]:
    """The checks of each scene: name, status, figure, remedy."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library)}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(scenes),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def faults(checks: list[list[str]]) -> dict[str, str]:
    """What is not PASS: by name, the status and the figure. Each has a remedy, and no other."""
    for _, status, _, remedy in checks:
        assert bool(remedy) == (status != "PASS")
    return {name: f"{status} {figure}" for name, status, figure, _ in checks if status != "PASS"}


def test_numbers_of_gpus(library: Path, tmp_path: Path) -> None:
    none, one, two, eight, hidden, wrong = checked(
        library,
        [
            *(scene(tmp_path, [Gpu()] * count) for count in (0, 1, 2, 8)),
            scene(tmp_path, [Gpu()] * 2, CUDA_VISIBLE_DEVICES=""),
            scene(tmp_path, [Gpu()] * 2, CUDA_VISIBLE_DEVICES="7"),
        ],
    )
    assert faults(none)["GPUs"].startswith("WARN Detected 0 GPUs")
    for checks, count in ((one, 1), (two, 2), (eight, 8)):
        assert not faults(checks)
        assert checks[0][2].startswith(f"Detected {count} GPU")
        assert [name for name, *_ in checks if name.startswith("GPU ") and name[4:].isdigit()] == [
            f"GPU {index}" for index in range(count)
        ]
    assert one[1][2].startswith("NVIDIA H200 (UUID: GPU-00-x), 139.7 GiB, 139.7 GiB free, driver")
    assert "GPU links" not in [name for name, *_ in one]
    assert len({name: figure for name, _, figure, _ in eight}["GPU links"].split("\n")) == 9
    assert "leaves 0 of 2 GPUs" in faults(hidden)["visible GPUs"]
    assert "CUDA_VISIBLE_DEVICES=7 names 7" in faults(wrong)["GPUs"]


def test_what_is_wrong_with_a_gpu_is_said(library: Path, tmp_path: Path) -> None:
    """Each on GPU 0 of two, and a healthy one beside it."""
    users = tmp_path / "users"
    users.write_text(f"0 {os.getpid()}\n0 4194305\n")
    scenes = {name: scene(tmp_path, [gpu, Gpu()]) for name, gpu in ODD.items()}
    scenes["used"] = scene(tmp_path, [ODD["exclusive"], Gpu()], NVML_PROCESSES=str(users))
    scenes["mixed"] = scene(tmp_path, MIXED)
    scenes["apart"] = scene(tmp_path, [Gpu(peers=0), Gpu(), Gpu()])
    scenes["lost"] = scene(tmp_path, [Gpu(), Gpu(lost=1), Gpu()])
    scenes["without the lost one"] = scene(
        tmp_path, [Gpu(), Gpu(lost=1), Gpu()], CUDA_VISIBLE_DEVICES="0,2"
    )
    scenes["broken driver"] = scene(tmp_path, [Gpu()], NVML_FAULT="18")
    results = dict(zip(scenes, checked(library, list(scenes.values())), strict=True))
    wrong = {name: faults(checks) for name, checks in results.items()}
    expected = {
        "hot": ("GPU 0 clock", "WARN its clock is held down: it is too hot and its power supply"),
        "errors": ("GPU 0 memory", "FAIL 3 errors in its memory"),
        "prohibited": ("GPU 0 mode", "FAIL no process may compute"),
        "exclusive": ("GPU 0 mode", "WARN one process at a time"),
        "narrow": ("GPU 0 slot", "WARN it uses 4 of its 16 PCIe lanes"),
        "full": ("GPU 0 in use", "WARN 93.1 GiB of 139.7 GiB are taken by a program that is not"),
        "mixed": ("GPU models", "WARN 2 kinds of GPU"),
        "apart": ("GPU peer access", "WARN GPUs 0-1 and 0-2 don't read"),
        "lost": ("GPUs", "FAIL the driver has lost GPU 1"),
        "broken driver": ("GPUs", "FAIL NVIDIA's driver is there and can't be asked: RM has"),
    }
    for name, (check, figure) in expected.items():
        assert list(wrong[name]) == [check]
        assert wrong[name][check].startswith(figure)
    assert set(wrong["used"]) == {"GPU 0 in use", "GPU 0 mode"}
    name = psutil.Process().name() if counts_as_driver() else "a process that is not seen from here"
    assert (
        f"{name} (process {os.getpid()}, 1000 B), a process that" in wrong["used"]["GPU 0 in use"]
    )
    assert wrong["used"]["GPU 0 mode"].startswith("FAIL")
    hides = wrong["without the lost one"]["visible GPUs"]
    assert hides.startswith("WARN CUDA_VISIBLE_DEVICES=0,2 leaves 2; of the others: the driver has")
    for healthy in ("power limit", "shared"):
        assert not wrong[healthy]


def test_an_old_driver_tells_little_and_nothing_is_made_up(tmp_path: Path) -> None:
    library = nvml.library(tmp_path, old=True)
    (checks,) = checked(library, [scene(tmp_path, [Gpu()] * 2)])
    assert not faults(checks)
    assert checks[1][:3] == ["GPU 0", "PASS", "NVIDIA H200, 139.7 GiB, 139.7 GiB free"]
    assert "GPU peer access" not in [name for name, *_ in checks]


def test_cards_without_a_driver_are_named(tmp_path: Path, library: Path) -> None:
    for number, (vendor, kind) in enumerate(
        [("0x10de", "0x030200"), ("0x10de", "0x030000"), ("0x10de", "0x040300"), ("0x8086", "0x03")]
    ):
        device = tmp_path / f"sys/bus/pci/devices/0000:0{number}:00.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{kind}\n")
    (checks,) = checked(library, [scene(tmp_path, [])])
    assert (
        "FAIL this machine has 2 cards of NVIDIA, and no driver answers" in faults(checks)["GPUs"]
    )


def test_what_stands_between_gpus(tmp_path: Path) -> None:
    """An IOMMU that translates, a bridge that redirects, cores that are far away."""
    states = [GpuState(bus=f"0000:3{index}:00.0") for index in range(2)]
    for state in states:
        device = tmp_path / "sys/bus/pci/devices" / state.bus
        (device / "iommu_group").mkdir(parents=True)
        (device / "iommu_group/type").write_text("DMA-FQ\n")
        (device / "local_cpulist").write_text("4000-4010,4020\n")
        (device / "numa_node").write_text("1\n")
    bridge = tmp_path / "sys/bus/pci/devices/0000:00:01.0"
    bridge.mkdir()
    (bridge / "class").write_text("0x060400\n")
    first = struct.pack("<I", 0x0001 | 1 << 16 | 0x140 << 20)  # another capability, then ACS
    config = bytes(0x100) + first.ljust(0x40, b"\0")
    (bridge / "config").write_bytes(config + struct.pack("<IHH", 0x000D | 1 << 16, 0x5F, 0x1D))
    slow = paths.Paths({(0, 1): "CPU", (1, 0): "CPU"}, {})
    checks = paths.check_topology(slow, states, tmp_path)
    assert {check.name for check in checks if check.status == "WARN"} == {
        *("IOMMU", "PCIe ACS", "CPU affinity"),
    }
    assert checks[0].figure.splitlines()[1].split() == ["GPU", "0", "-", "CPU", "1"]
    fast = paths.Paths({(0, 1): "NVLink x 4", (1, 0): "NVLink x 4"}, {})
    names = [check.name for check in paths.check_topology(fast, states, tmp_path)]
    assert names == ["GPU links", "CPU affinity"]  # these paths pass by PCIe
    (bridge / "config").write_bytes(config[:64])  # all that others than root may read
    assert "PCIe ACS" not in [one.name for one in paths.check_topology(slow, states, tmp_path)]


PLANS = """
import contextlib, io, json, os, sys
from samecurve.cli.main import main
for scene in json.load(sys.stdin):
    os.environ["NVML_GPUS"] = scene["file"]
    sys.argv = ["samecurve", "plan", "-f", scene["config"], *scene["flags"]]
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            main()
        except SystemExit as end:
            print(end.code, file=text)
    print(json.dumps(text.getvalue()))
"""


@pytest.mark.long
def test_plans_on_these_gpus(library: Path, tmp_path: Path, corpus: Path) -> None:
    """As `train` shows them first: devices, world, and what is refused."""
    old = nvml.library(tmp_path, old=True)
    config = write_config(tmp_path, corpus)
    scenes = [
        ([], [], ["world 1", "no GPU found"]),
        ([Gpu()], [], ["world 1", "1 of 1 visible devices"]),
        ([Gpu()] * 8, [], ["world 8   ddp over nccl", "8 of 8 visible devices"]),
        ([Gpu()] * 8, ["--gpus", "2,5"], ["world 2", "2 of 8 visible devices, as asked"]),
        ([Gpu()] * 2, ["--gpus", "2"], ["GPU 2 does not exist", "here: 0 (NVIDIA H200), 1"]),
        (MIXED, [], ["world 2", "RTX 4090"]),
        ([ODD["shared"]], [], ["world 1"]),
        ([Gpu(memory=123_456_789), Gpu()], [], ["memory"]),
        ([Gpu(lost=1), Gpu()], [], ["the driver has lost GPU 0", "CUDA_VISIBLE_DEVICES=1 leaves"]),
    ]
    for home in (library, old):
        values = [
            {**scene(tmp_path, gpus), "config": str(config), "flags": flags}
            for gpus, flags, _ in scenes
        ]
        environment = {**os.environ, "LD_LIBRARY_PATH": str(home)}
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        done = subprocess.run(
            [sys.executable, "-c", nvml.ENGINES + PLANS],
            input=json.dumps(values),
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        for line, (_, _, expected) in zip(done.stdout.splitlines(), scenes, strict=True):
            text = json.loads(line)
            assert "Traceback" not in text
            for words in expected:
                assert words in text
