"""AMD GPUs as the kernel's driver lays them out: a tree as a machine of two CPU sockets and three
MI300X has it.
"""

import sys
from pathlib import Path

import pytest

from commands import refused, write_config
from samecurve.cli.main import main
from samecurve.errors import UserError
from samecurve.probe import engines, gpus, probe


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
    assert [(gpu.index, gpu.name, gpu.memory) for gpu in gpus.amd_devices({}, topology)] == [
        (0, "AMD gfx942", 2 << 30),
        (1, "AMD gfx942", 3 << 30),
        (2, "AMD gfx942", 4 << 30),
    ]
    assert gpus.amd_devices({}, topology / "none") == ()


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
    assert [gpu.memory >> 30 for gpu in gpus.amd_devices(environment, topology)] == expected


def test_what_is_not_there_is_refused(topology: Path) -> None:
    with pytest.raises(
        UserError, match=r"HIP_VISIBLE_DEVICES=3 names 3, and this machine has GPUs 0, 1, 2"
    ):
        gpus.amd_devices({"HIP_VISIBLE_DEVICES": "3"}, topology)


def test_training_sees_the_cards_that_run_sees(
    topology: Path,
    tmp_path: Path,
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(gpus, "TOPOLOGY", topology)
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
        monkeypatch.setattr(gpus, "_read_name", lambda _values, name=name: name)
        names = {gpu.name for gpu in gpus.amd_devices({}, topology)}
        assert names == {"AMD Instinct MI300X (gfx942)"}
