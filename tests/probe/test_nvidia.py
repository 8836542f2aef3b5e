"""NVIDIA GPUs as the driver's library tells them: a stand-in for that library, under the unmodified
pynvml.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import nvml
from samecurve.probe.engines import torch_build, unfit_engines

PROGRAM = """
import json
from samecurve.core.config.loading import load_document
from samecurve.core.config.document import Document
from samecurve.core.planning.machine import choose_devices
from samecurve.errors import UserError
from samecurve.probe import probe
from samecurve.tasks import Tasks
import sys
try:
    document = Document({"batch": {"samples": 1}, "devices": {"use": sys.argv[1]}})
    config = load_document(document, Tasks()).config
    devices = choose_devices(config.devices, config.engine, probe()).value
    print(json.dumps([[d.index, d.name, d.memory, d.driver] for d in devices]))
except UserError as error:
    print(json.dumps(str(error)))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nvml.library(tmp_path_factory.mktemp("nvml"), 3)


def choose(library: Path, use: str, visible: str | None = None, engines: str = nvml.ENGINES) -> Any:
    """engines: the head of the program, which puts other engines in place of those installed"""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library)}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    done = subprocess.run(
        [sys.executable, "-c", engines + PROGRAM, use],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


SENSORS = """
import json, os
from samecurve.probe import probe
from samecurve.probe.sensors import Sensors
gpus = probe().devices
sensors = Sensors((gpus[1], gpus[0], gpus[1]), (0, 1, 2), 1)
print(json.dumps(sensors.read({0: os.getpid(), 1: os.getpid()})))
sensors.close()
"""


def test_sensors_follow_the_devices_and_miss_what_is_not_there(library: Path) -> None:
    """GPUs 2 and 1 of the driver; rank 2 lives on another host.

    No temperature in this driver, no power of GPU 1.
    """
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library), "CUDA_VISIBLE_DEVICES": "1,2"}
    values = json.loads(
        subprocess.run(
            [sys.executable, "-c", SENSORS],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    )
    assert values["utilisation_by_device"] == [0.92, 0.91, None]
    assert values["memory_bytes_by_device"] == [3000, 2000, None]
    assert values["power_watts_by_device"] == [650.5, None, None]
    assert "celsius_by_device" not in values
    assert values["memory_bytes_by_process"][2] is None
    assert values["host_memory_bytes"] > 0


def test_all_are_listed_with_name_memory_and_driver(library: Path) -> None:
    assert choose(library, "auto") == [
        [i, f"NVIDIA H200 no. {i}", 150000000000, "580.00"] for i in range(3)
    ]


def test_visible_devices_and_indices_mean_the_same(library: Path) -> None:
    """`--gpus 1,2` and `CUDA_VISIBLE_DEVICES=1,2 --gpus 0,1` are the same two GPUs."""
    plain, visible, named = (
        choose(library, "1,2"),
        choose(library, "0,1", "1,2"),
        choose(library, "all", "GPU-11,GPU-22"),
    )
    assert (
        [d[1] for d in plain]
        == [d[1] for d in visible]
        == [d[1] for d in named]
        == ["NVIDIA H200 no. 1", "NVIDIA H200 no. 2"]
    )
    assert [d[0] for d in visible] == [0, 1]


@pytest.mark.parametrize(
    ("use", "visible", "says"),
    [
        ("0,9", None, "GPU 9 does not exist"),
        ("2", "0,1", "GPU 2 does not exist"),
        ("0", "7", "CUDA_VISIBLE_DEVICES=7"),
        ("all", "", "no GPU found"),
    ],
)
def test_what_is_not_there_is_refused_with_what_is(
    use: str, visible: str | None, says: str, library: Path
) -> None:
    assert says in choose(library, use, visible)


def test_an_engine_that_is_built_without_cuda_is_refused_where_it_would_be_used(
    library: Path,
) -> None:
    """With what puts the other build in its place; CPU ranks need none."""
    without = """
from samecurve.probe import engines
engines.torch_build = lambda: engines.TorchBuild("2.13.0+cpu", None, None)
"""
    said = choose(library, "auto", engines=without)
    assert "3 GPUs (NVIDIA H200 no. 0) for engine torch" in said
    assert "the installed torch 2.13.0+cpu is built without CUDA" in said
    assert "uninstall -y torch && " in said
    assert "install torch==2.13.0 puts the CUDA build in its place; or --devices cpu" in said
    assert choose(library, "cpu:2", engines=without)[1][0] == 1


def test_what_an_engine_is_built_for_is_read_from_its_files() -> None:
    """As it says itself, once it is imported."""
    build = torch_build()
    assert build is not None
    torch_says = (torch.__version__, torch.version.cuda, torch.version.hip)
    assert (build.version, build.cuda, build.hip) == torch_says
    assert set(unfit_engines("")) == set()
    assert ("torch" in unfit_engines("AMD")) == (torch.version.hip is None)
