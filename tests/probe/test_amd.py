"""AMD GPUs as the kernel's driver lays them out: a tree as a machine of two CPU sockets and three
MI300X has it.
"""

import os
import sys
from pathlib import Path

import pytest

import samecurve.probe
from commands import refused, write_config
from samecurve.cli.main import main
from samecurve.core.planning.machine import Device
from samecurve.errors import UserError
from samecurve.probe import amd, amd_load, amd_sources, engines, probe
from samecurve.probe.gpu_state import amd_states
from samecurve.probe.sensors import Sensors


@pytest.fixture
def topology(tmp_path: Path) -> Path:
    for node, (units, unique) in enumerate(
        [(0, 0), (0, 0), (1216, 0xA0), (1216, 0xB1), (1216, 0xC2)]
    ):
        home = tmp_path / "nodes" / str(node)
        (home / "mem_banks/0").mkdir(parents=True)
        version = 90402 if units else 0
        (home / "properties").write_text(
            f"cpu_cores_count {0 if units else 96}\nsimd_count {units}\ngfx_target_version"
            f" {version}\nunique_id {unique}\ndrm_render_minor 9999\n"
        )
        (home / "mem_banks/0/properties").write_text(
            f"heap_type {1 if units else 0}\nsize_in_bytes {node << 30}\nflags 0\n"
        )
    (tmp_path / "nodes/10").mkdir()
    (tmp_path / "nodes/10/properties").write_text("")  # hidden from this container
    return tmp_path


def test_name_and_memory_of_each(topology: Path) -> None:
    assert [(gpu.index, gpu.name, gpu.memory) for gpu in amd.devices({}, topology)] == [
        (0, "AMD gfx942", 2 << 30),
        (1, "AMD gfx942", 3 << 30),
        (2, "AMD gfx942", 4 << 30),
    ]
    assert amd.devices({}, topology / "none") == ()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"HIP_VISIBLE_DEVICES": "2,0"}, [4, 2]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, [3]),
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, [2]),
        ({"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "1"}, [4]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-00000000000000b1"}, [3]),
        ({"HIP_VISIBLE_DEVICES": "-1"}, []),
    ],
)
def test_variables_choose(environment: dict[str, str], expected: list[int], topology: Path) -> None:
    assert [gpu.memory >> 30 for gpu in amd.devices(environment, topology)] == expected


def test_what_is_not_there_is_refused(topology: Path) -> None:
    with pytest.raises(
        UserError, match=r"HIP_VISIBLE_DEVICES=3 names 3, and this machine has GPUs 0, 1, 2"
    ):
        amd.devices({"HIP_VISIBLE_DEVICES": "3"}, topology)


def test_training_sees_the_cards_that_run_sees(
    topology: Path,
    tmp_path: Path,
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(samecurve.probe, "TOPOLOGY", topology)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0,2")
    assert [gpu.memory >> 30 for gpu in probe().devices] == [2, 4]
    home = tmp_path / "home"
    home.mkdir()
    config = write_config(home, corpus)
    said = refused(monkeypatch, capsys, "train", "-f", config, cwd=home)
    assert "2 GPUs (AMD gfx942) for engine torch, and the installed torch" in said
    assert "is built without ROCm" in said
    build = engines.TorchBuild("2.13.0", None, "7.0")
    monkeypatch.setattr(engines, "torch_build", lambda: build)
    monkeypatch.setattr(sys, "argv", ["samecurve", "plan", "-f", str(config)])
    main()
    shown = capsys.readouterr().out
    assert "plan   world 2   ddp over nccl" in shown
    assert "2 of 2 visible devices" in shown


def test_the_maker_is_named_once(topology: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Firmware begins a card's name with it or does not."""
    for name in ("AMD Instinct MI300X (gfx942)", "Instinct MI300X (gfx942)"):
        monkeypatch.setattr(amd_sources, "_card_name", lambda *_, name=name: name)
        names = {gpu.name for gpu in amd.devices({}, topology)}
        assert names == {"AMD Instinct MI300X (gfx942)"}


# as ROCm 6 prints it: the cards by their numbers, which is not the order of the kernel's nodes
COMMAND = """#!/bin/sh
echo "WARNING: AMD GPU device(s) is/are in a low-power state. Check power control/runtime_status"
echo
cat <<'END'
{"card0": {"Unique ID": "0xb1", "VRAM Total Memory (B)": "206141652992",
  "VRAM Total Used Memory (B)": "297664512", "Card Series": "AMD Instinct MI300X",
  "Card Model": "0x74a1", "Card Vendor": "Advanced Micro Devices, Inc. [AMD/ATI]",
  "Node ID": "3", "GUID": "28851", "GFX Version": "gfx942"},
 "card1": {"Unique ID": "0xa0", "VRAM Total Memory (B)": "206141652992",
  "VRAM Total Used Memory (B)": "N/A", "Card Series": "AMD Instinct MI300X", "Node ID": "2",
  "GFX Version": "gfx942"},
 "system": {"Driver version": "6.8.5"}}
END
"""

LIBRARY = """
def amdsmi_init(): pass
def amdsmi_shut_down(): pass
def amdsmi_get_processor_handles(): return [0, 1]
def amdsmi_get_gpu_asic_info(handle):
    return {"market_name": "AMD Instinct MI300X", "vendor_id": 4098, "rev_id": 0,
            "asic_serial": "0xB1" if handle == 0 else "0xA0",
            "target_graphics_version": "gfx942"}
def amdsmi_get_gpu_vram_usage(handle): return {"vram_total": 196592, "vram_used": 283}
def amdsmi_get_gpu_enumeration_info(handle): return {"hip_id": 1 - handle, "hsa_id": 3 - handle}
def amdsmi_get_gpu_total_ecc_count(handle):
    return {"correctable_count": 2, "uncorrectable_count": handle, "deferred_count": 0}
def amdsmi_get_gpu_process_list(handle): raise RuntimeError("AMDSMI_STATUS_NO_PERM")
def amdsmi_get_gpu_driver_info(handle): return {"driver_name": "amdgpu", "driver_version": "6.8.5"}
def amdsmi_get_gpu_device_bdf(handle): return f"0000:0{handle}:00.0"
"""


def test_the_command_is_asked_where_the_library_is_not_there(
    topology: Path, tmp_path: Path
) -> None:
    """Its cards are put into HIP's order, and what it does not know is not made up."""
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin/rocm-smi"
    command.write_text(COMMAND)
    command.chmod(0o755)
    environment = {"PATH": f"{command.parent}:/usr/bin:/bin"}
    devices = amd.devices(environment, topology)
    assert [(gpu.name, gpu.memory) for gpu in devices] == [
        ("AMD Instinct MI300X (gfx942)", 206141652992)
    ] * 2
    states = amd_states(amd.visible(environment, topology))
    assert [state.uuid for state in states] == ["GPU-00000000000000a0", "GPU-00000000000000b1"]
    assert [state.free for state in states] == [None, 206141652992 - 297664512]
    assert len(amd.devices({**environment, "ROCR_VISIBLE_DEVICES": "1"}, topology)) == 1
    for broken in ("exit 1", "echo '{\"card0\": {}}'", "echo '[1'"):
        command.write_text(f"#!/bin/sh\n{broken}\n")
        assert len(amd.devices(environment, topology)) == 3  # as the kernel has them


def test_the_library_is_asked_first(
    topology: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "python").mkdir()
    (tmp_path / "python/amdsmi.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path / "python")
    first, second = amd.devices({}, topology)
    assert first.name == second.name == "AMD Instinct MI300X (gfx942)"
    assert (first.memory, first.driver) == (196592 << 20, "6.8.5")
    states = amd_states(amd.visible({}, topology))
    assert [state.uncorrected_errors for state in states] == [1, 0]
    assert [state.bus for state in states] == ["0000:01:00.0", "0000:00:00.0"]
    del sys.modules["amdsmi"]


@pytest.mark.parametrize(
    "fault", ["raise KeyError('libamd_smi.so')", "raise OSError(2)", "def amdsmi_init(): 1 / 0"]
)
def test_a_library_that_does_not_load_is_passed_by(
    fault: str, topology: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "python").mkdir()
    (tmp_path / "python/amdsmi.py").write_text(fault)
    monkeypatch.syspath_prepend(tmp_path / "python")
    assert [gpu.memory >> 30 for gpu in amd.devices({}, topology)] == [2, 3, 4]
    sys.modules.pop("amdsmi", None)


def test_links_between_cards(topology: Path) -> None:
    """XGMI between the first two; PCIe, through the host, from each to the third."""
    for node, other, kind in ((2, 3, 11), (3, 2, 11), (2, 4, 2), (4, 2, 2), (2, 0, 2)):
        home = topology / f"nodes/{node}/io_links/{other}"
        home.mkdir(parents=True)
        text = f"type {kind}\nnode_from {node}\nnode_to {other}\nweight 15\n"
        (home / "properties").write_text(text)
    assert amd.links({}, topology) == {
        **dict.fromkeys([(0, 1), (1, 0)], "XGMI"),
        **dict.fromkeys([(0, 2), (2, 0)], "PCIe"),
    }
    assert amd.links({"HIP_VISIBLE_DEVICES": "1,0"}, topology)[0, 1] == "XGMI"
    assert (0, 1) not in amd.links({"HIP_VISIBLE_DEVICES": "1,2"}, topology)


def test_what_the_cards_do_during_a_run(
    topology: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the kernel's files, in the order of the devices; what a card lacks is not made up."""
    (tmp_path / "python").mkdir()
    (tmp_path / "python/amdsmi.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path / "python")
    for bus, files in {
        "0000:01:00.0": {
            "gpu_busy_percent": "97",
            "mem_info_vram_used": str(3 << 30),
            "hwmon/hwmon4/power1_input": "701000000",
            "hwmon/hwmon4/temp1_input": "64000",
        },
        "0000:00:00.0": {"gpu_busy_percent": "", "hwmon/hwmon5/power1_average": "120500000"},
    }.items():
        for name, text in files.items():
            file = tmp_path / "pci" / bus / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{text}\n")
    monkeypatch.setattr(samecurve.probe, "TOPOLOGY", topology)
    monkeypatch.setattr(amd_load, "PCI", tmp_path / "pci")
    devices = [
        Device(kind="cuda", index=index, name="AMD Instinct MI300X", memory=1 << 37)
        for index in range(3)
    ]
    sensors = Sensors(devices, [0, 1, 2], 1)
    values = sensors.read({0: os.getpid(), 1: os.getpid(), 2: os.getpid()})
    sensors.close()
    assert values["utilisation_by_device"] == [0.97, None, None]
    assert values["memory_bytes_by_device"] == [3 << 30, None, None]
    assert values["power_watts_by_device"] == [701.0, 120.5, None]
    assert values["celsius_by_device"] == [64.0, None, None]
    del sys.modules["amdsmi"]
