"""What the stand-ins for the drivers' libraries tell of emulated GPUs, faults included."""

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from emulated import only_emulated

from commands import command
from samecurve import probe
from samecurve.probe import (
    amd_load,
    amd_sources,
    find_gpus,
    gpu_health,
    gpu_state,
    links,
    nvidia,
    sensors,
)
from samecurve.probe.gpu_health import GpuHealth
from samecurve_products.rehearse.emulated_cuda import build, told_kernel
from samecurve_products.rehearse.emulated_cuda.gpus import (
    STATE,
    GpuFaults,
    write_faults,
    write_held,
)
from samecurve_products.rehearse.emulated_cuda.machine import GPUS, Emulation

START = Path(build.__file__).with_name("start")
PROBE = Path(nvidia.__file__).parent
ASKING = (gpu_health, gpu_state, links, nvidia, sensors)  # the modules that import pynvml


def stand_in(name: str, file: str) -> ModuleType:
    """A module of start/, loaded under this environment and not put into sys.modules."""
    spec = importlib.util.spec_from_file_location(name, START / file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three emulated GPUs, and the directory that their processes share."""
    monkeypatch.setenv("EMULATED_CUDA", "1")
    monkeypatch.setenv("EMULATED_CUDA_DEVICES", "3")
    monkeypatch.setenv(STATE, str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


@pytest.fixture
def driver(state: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The probe of this process asks NVIDIA's stand-in. The value is that of `state`."""
    module = stand_in("emulated_pynvml", "pynvml.py")
    for asking in ASKING:
        monkeypatch.setattr(asking, "pynvml", module)
    return state


@pytest.mark.usefixtures("state")
def test_the_stand_ins_answer_all_that_the_probe_asks() -> None:
    """A question that is new in src has to be answered; elsewhere pynvml is not asked at all."""
    asked = {file: file.read_text() for file in PROBE.parent.rglob("*.py")}
    assert {file.parent for file, text in asked.items() if "import pynvml" in text} == {PROBE}
    attributes = {
        node.attr
        for text in asked.values()
        if "import pynvml" in text
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "pynvml"
    }
    module = stand_in("emulated_pynvml", "pynvml.py")
    functions = {name for name in attributes if name.startswith("nvml") and "Reason" not in name}
    older = {"nvmlDeviceGetComputeRunningProcesses_v2"}
    assert {*functions - older, "nvmlDeviceGetCurrentClocksThrottleReasons"} <= vars(module).keys()
    for name in attributes - functions:
        assert getattr(module, name) is not None
    library = stand_in("emulated_amdsmi", "amdsmi/__init__.py")
    source = Path(amd_sources.__file__).read_text()
    words = {word.strip('"(') for word in source.replace("library.", " ").split()}
    assert {word.partition("(")[0] for word in words if word.startswith("amdsmi_")} <= vars(
        library
    ).keys()


def test_the_probe_sees_them_and_their_memory(driver: Path) -> None:
    found = find_gpus(os.environ)
    h100 = GPUS["H100"]
    assert (found.vendor, found.variable) == ("NVIDIA", "CUDA_VISIBLE_DEVICES")
    assert [(gpu.name, gpu.memory, gpu.capability) for gpu in found.devices] == [
        (h100.name, h100.memory, "9.0")
    ] * 3
    write_held(driver, {1: 3 << 30})
    write_faults(driver, {2: GpuFaults(uncorrected_errors=4, slowdowns=0x20, used_by_others=1)})
    states = gpu_state.gpu_states("NVIDIA", os.environ)
    assert (states[0].free, states[0].processes) == (h100.memory, ())
    assert states[1].free == h100.memory - (3 << 30) - (512 << 20)
    assert [process.pid for process in states[1].processes] == [os.getpid()]
    assert (states[2].uncorrected_errors, states[2].free) == (4, h100.memory - 1)
    assert states[2].slowdowns == ("it is near its highest temperature",)
    assert links.find_links()[0, 1] == "NVLink x 18"
    write_faults(driver, {1: GpuFaults(lost=True)})
    with pytest.raises(Exception, match="the driver has lost GPU 1: GPU is lost"):
        find_gpus(os.environ)


def test_a_fault_in_mid_run_is_told_once(driver: Path) -> None:
    """What was there as the run began is `samecurve check`'s to tell."""
    write_faults(driver, {0: GpuFaults(uncorrected_errors=2)})
    health = GpuHealth(nvidia.handles(os.environ))
    assert health.new_faults([0, 1, 2]) == []
    write_faults(
        driver, {0: GpuFaults(uncorrected_errors=3, slowdowns=0x40), 1: GpuFaults(lost=True)}
    )
    told = health.new_faults([0, 1, 2])
    assert [index for index, _ in told] == [0, 0, 1]
    assert told[0][1].startswith("1 new error in its memory could not be corrected")
    assert (
        "its clock is held down, and all devices wait for the slowest: it is too hot" in told[1][1]
    )
    assert told[2][1].startswith("the driver has lost it (GPU is lost)")
    assert health.new_faults([0, 1, 2]) == []
    write_faults(driver, {0: GpuFaults(uncorrected_errors=5)})
    assert health.new_faults([1, 2]) == []  # GPU 0 is another host's to tell
    assert [text.partition(" in ")[0] for _, text in health.new_faults([0])] == ["2 new errors"]


def test_without_emulation_there_is_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EMULATED_CUDA", raising=False)
    module = stand_in("emulated_pynvml", "pynvml.py")
    with pytest.raises(module.NVMLError_LibraryNotFound):
        module.nvmlInit()
    assert sys.modules.get("pynvml") is not module


def test_an_amd_gpu_is_told_by_its_library(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMULATED_CUDA_GPU", "MI300X")
    monkeypatch.setitem(sys.modules, "amdsmi", stand_in("amdsmi", "amdsmi/__init__.py"))
    write_faults(state, {1: GpuFaults(uncorrected_errors=7)})
    found = amd_sources.from_library()
    assert [gpu.name for gpu in found] == ["AMD Instinct MI300X (gfx942)"] * 3
    assert [gpu.uncorrected_errors for gpu in found] == [0, 7, 0]
    assert found[0].memory == GPUS["MI300X"].memory


def test_a_machine_of_amd_gpus_is_found_as_rocm_lays_it_out(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names, memory, links, faults and sensors, in the order that ROCR_VISIBLE_DEVICES gives."""
    monkeypatch.setenv("EMULATED_CUDA_GPU", "MI300X")
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "2,0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(state))
    monkeypatch.setitem(sys.modules, "amdsmi", stand_in("amdsmi", "amdsmi/__init__.py"))
    without_driver = stand_in("emulated_pynvml", "pynvml.py")
    for asking in ASKING:
        monkeypatch.setattr(asking, "pynvml", without_driver)
    monkeypatch.setattr(probe, "TOPOLOGY", probe.TOPOLOGY)  # both are put back after this test
    monkeypatch.setattr(amd_load, "read_card", amd_load.read_card)
    for name, look in told_kernel.looks(os.environ).items():
        look(sys.modules[name])
    write_faults(state, {2: GpuFaults(uncorrected_errors=7, celsius=80)})
    write_held(state, {0: 3 << 30})
    found = find_gpus(os.environ)
    mi300x = "AMD Instinct MI300X (gfx942)"
    assert (found.vendor, found.variable) == ("AMD", "HIP_VISIBLE_DEVICES")
    assert [(gpu.name, gpu.memory) for gpu in found.devices] == [
        (mi300x, GPUS["MI300X"].memory)
    ] * 2
    assert links.find_links() == {(0, 1): "XGMI", (1, 0): "XGMI"}
    states = gpu_state.gpu_states("AMD", os.environ)
    assert [gpu.uncorrected_errors for gpu in states] == [7, 0]
    assert [process.pid for process in states[1].processes] == [os.getpid()]
    [kernels] = {gpu.name for gpu in amd_sources.from_kernel(probe.TOPOLOGY)}
    assert kernels == "gfx942"  # where amdsmi is not installed
    reading = sensors.Sensors(found.devices, [0, 1], 1).read({0: os.getpid(), 1: os.getpid()})
    assert reading["celsius_by_device"] == [80, 41]
    assert reading["memory_bytes_by_device"] == [0, (3 << 30) + (512 << 20)]


@pytest.mark.long  # two runs of the program: 10 s
@only_emulated
def test_check_and_plan_name_amd_gpus_and_rccl(tmp_path: Path) -> None:
    tiny = Path(__file__).parents[2] / "models" / "tiny.yaml"
    printed = "".join(
        subprocess.run(
            command(*words),
            cwd=tmp_path,
            env={**os.environ, **Emulation(gpu="MI300X").environment()},
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        ).stdout
        for words in (("check",), ("plan", "-f", tiny))
    )
    for words in (
        "MI300X (gfx942) (UUID",
        "built for ROCm 7.0.51831; it sees 2 of 2 GPUs",
        "PASS   RCCL  ",
        "ddp over nccl   f32   2 x AMD Instinct MI300X (gfx942)",
    ):
        assert words in printed
