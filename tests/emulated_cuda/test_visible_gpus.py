"""Emulated GPUs are hidden by CUDA_VISIBLE_DEVICES and HIP's variables as real ones are."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

import pytest
from emulated import only_emulated
from test_drivers_view import ASKING, stand_in

from samecurve import probe
from samecurve.errors import UserError
from samecurve_products.rehearse.emulated_cuda.gpus import AMD, NVIDIA, STATE, id_of
from samecurve_products.rehearse.emulated_cuda.machine import Emulation
from samecurve_products.rehearse.emulated_cuda.visible import visible_gpus

FOUR = {"EMULATED_CUDA": "1", "EMULATED_CUDA_DEVICES": "4"}
LAST = id_of(3, NVIDIA)


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        (None, (0, 1, 2, 3)),
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("2,0", (2, 0)),
        ("1,9,2", (1,)),  # what follows a number that is not there is hidden, too
        ("1,,2", (1,)),
        ("1,1", ()),
        (" 3x, 1", (3, 1)),
        (f"{LAST},1", (3, 1)),
        (LAST[:8], (3,)),  # how an id begins
        ("GPU-", ()),  # all ids begin so
        ("GPU-ffff", ()),
    ],
)
def test_numbers_order_and_ids_choose_as_on_cuda(value: str | None, seen: tuple[int, ...]) -> None:
    chosen = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert visible_gpus({**FOUR, **chosen, "HIP_VISIBLE_DEVICES": "0"}) == seen


@pytest.mark.parametrize(
    ("variables", "seen"),
    [
        ({"ROCR": "3,1", "HIP": "1"}, (1,)),  # HIP counts what the layer below it leaves
        ({"ROCR": f"{id_of(2, AMD)},0"}, (2, 0)),
        ({"CUDA": "2"}, (2,)),  # HIP reads CUDA's variable, where it has none of its own
        ({"CUDA": "2", "HIP": "1"}, (1,)),
        ({"HIP": "-1"}, ()),
    ],
)
def test_hip_and_the_runtime_below_choose_one_after_the_other(
    variables: dict[str, str], seen: tuple[int, ...]
) -> None:
    chosen = {f"{name}_VISIBLE_DEVICES": value for name, value in variables.items()}
    assert visible_gpus({**FOUR, "EMULATED_CUDA_GPU": "MI300X", **chosen}) == seen


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The stand-in for the driver's library of four GPUs, which the probe of this process asks."""
    for name, value in FOUR.items():
        monkeypatch.setenv(name, value)
    module = stand_in("emulated_pynvml", "pynvml.py")
    for asking in ASKING:
        monkeypatch.setattr(asking, "pynvml", module)
    return module


def test_the_drivers_library_does_not_obey_and_the_probe_does(
    nvml: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{LAST},0")
    assert nvml.nvmlDeviceGetCount() == 4
    found = probe.find_gpus(os.environ)
    assert [device.index for device in found.devices] == [0, 1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES=7 names 7"):
        probe.find_gpus(os.environ)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert probe.find_gpus(os.environ).devices == ()


TORCH = """
import json, os, sys, time, torch
from pathlib import Path

def tell():
    row = {"count": torch.cuda.device_count(), "available": torch.cuda.is_available()}
    os.environ["CUDA_VISIBLE_DEVICES"] = "0,1,2,3"  # too late: the driver has been asked
    try:
        ones = [torch.ones(1 << 20, device=f"cuda:{i}") for i in range(row["count"])]
        row["sum"] = sum(one.sum().item() for one in ones)
        row["ids"] = [f"GPU-{torch.cuda.get_device_properties(one.device).uuid}" for one in ones]
        torch.ones(1, device=f"cuda:{row['count']}")
    except (RuntimeError, AssertionError) as error:
        row["error"] = str(error)
    time.sleep(0.3 if row["available"] else 0)
    held = Path(os.environ["EMULATED_CUDA_STATE"], f"{os.getpid()}.json")
    row["held"] = sorted(json.loads(held.read_text())) if held.exists() else []
    torch.ones(2, requires_grad=True).sum().backward()  # on the CPU, also without GPUs
    print(json.dumps(row), flush=True)

for value in sys.argv[1:]:
    if not (child := os.fork()):
        os.environ["CUDA_VISIBLE_DEVICES"] = value  # after torch's import, before CUDA's start
        tell()
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, object]]:
    """What torch says under a value of the variable; one start of torch serves all values."""
    values = ["", f"2,{id_of(0, NVIDIA)}"]
    state = tmp_path_factory.mktemp("state")
    environment = {**os.environ, **Emulation(devices=4).environment(), STATE: str(state)}
    done = subprocess.run(
        [sys.executable, "-c", TORCH, *values],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return dict(zip(values, rows, strict=True)).__getitem__


@only_emulated
def test_torch_counts_what_is_visible_and_the_driver_knows_which_gpu_is_used(
    told: Callable[[str], dict[str, object]],
) -> None:
    """cuda:0 is the machine's GPU 2 here."""
    row = told(f"2,{id_of(0, NVIDIA)}")
    assert (row["count"], row["available"], row["sum"]) == (2, True, 2 << 20)
    assert row["ids"] == [id_of(2, NVIDIA), id_of(0, NVIDIA)]
    assert row["held"] == ["0", "2"]
    assert "invalid device ordinal" in str(row["error"])


@only_emulated
def test_without_a_visible_gpu_torch_has_no_cuda(
    told: Callable[[str], dict[str, object]],
) -> None:
    row = told("")
    assert (row["count"], row["available"], row["held"]) == (0, False, [])
    assert row["error"] == "No CUDA GPUs are available"
