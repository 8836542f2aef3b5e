"""Under --exact, the pictures that a run shows have the same bytes on any number of devices."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("diffusers", reason="pip install -e '.[diffusion]'")

from noise_pictures import write_pictures

from commands import samecurve

UNET = {"architecture": "unet", "widths": [8, 16], "head_width": 8, "text_width": 8}
PROMPTS = ["one", "two", "three", "four"]


def drawn(home: Path, model: Mapping[str, Any], devices: str) -> dict[str, bytes]:
    """The files of the pictures, after two steps that change much."""
    values = {
        "task": "diffusion",
        "model": dict(model),
        "data": {
            "source": str(home / "set"),
            "resolution": 32,
            "buckets": False,
            "prompts": PROMPTS,
            "sample_steps": 3,
        },
        "batch": {"samples": 4},
        "optimizer": {"lr": 0.05},
        "train": {"precision": "f32", "steps": 2, "exact": True, "sample_every": 2},
    }
    (home / "config.json").write_text(json.dumps(values))
    run = home / devices.replace(":", "-")
    train = ("train", "-f", home / "config.json", "--save-dir", run)
    samecurve(*train, "--devices", devices, cwd=home, timeout=300)
    return {file.name: file.read_bytes() for file in (run / "samples").glob("*.png")}


@pytest.mark.parametrize(
    ("kind", "others"),
    [
        ("pixels", ["cpu:2", "cpu:3"]),
        ("lora", ["cpu:2", "cpu:3"]),
    ],
)
@pytest.mark.long
def test_pictures_have_the_same_bytes(
    kind: str, others: list[str], pipelines: Mapping[str, Path], tmp_path: Path
) -> None:
    """More prompts than ranks, and not the same number for each."""
    lora = {"path": str(pipelines["sd15"]), "adapter": {"rank": 4}}
    write_pictures(tmp_path / "set", 8)
    model = UNET if kind == "pixels" else lora
    expected = drawn(tmp_path, model, "cpu")
    assert len(expected) == len(set(expected.values())) == len(PROMPTS)
    for devices in others:
        assert drawn(tmp_path, model, devices) == expected, devices
