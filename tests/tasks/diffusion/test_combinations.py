"""What people switch on together: one curve on any devices, across a resume in mid-epoch, too."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("diffusers", reason="pip install -e '.[diffusion]'")

from noise_pictures import write_pictures
from test_pipelines import values
from test_pixels import DATA, DIT, UNET

from one_curve import check_one_curve
from tiny import config_of
from worlds import Pool


class Case(NamedTuple):
    """model: of a new model, or kind of an adapter. near: relative, of the losses"""

    model: Mapping[str, Any]
    layouts: tuple[str, ...]
    sections: Mapping[str, Mapping[str, Any]]
    near: float = 1e-10


# 3..2: the run goes on from its middle on other devices
EVERYWHERE = ("ddp:3", "fsdp:3..ddp:2", "hsdp:4")
# a softmax does not see what is added to all keys: this gradient is rounding, and Adafactor makes
# of it a step as large as any other
NO_GRADIENT = [{"match": "*.to_k.bias", "freeze": True}]
LORA = {"adapter": {"rank": 4, "dropout": 0.1}}
CASES = {
    "unet, adamw8bit": Case(
        {**UNET, "widths": [64, 64]},  # rows of 64 numbers are kept in eight bits
        EVERYWHERE,
        {
            "optimizer": {"name": "adamw8bit"},
            "train": {"ema": 0.9, "recompute": "block", "check_replicas": 2},
            "batch": {"accumulate": 2},
        },
    ),
    "dit, adafactor": Case(
        DIT,
        EVERYWHERE,
        {
            "optimizer": {"name": "adafactor", "groups": NO_GRADIENT},
            "train": {"ema": 0.9, "recompute": "selective", "check_replicas": 2},
        },
    ),
    "lora, adamw": Case(
        LORA,
        EVERYWHERE,
        {
            "train": {"ema": 0.9, "recompute": "selective", "check_replicas": 2},
            "batch": {"accumulate": 2},
        },
    ),
    "lora, adafactor, offload": Case(
        LORA,
        ("ddp:3", "ddp:3..ddp:2"),
        {
            "optimizer": {"name": "adafactor"},
            "train": {"ema": 0.9, "recompute": "block", "check_replicas": 2},
            "devices": {"offload_frozen": 1.0},
        },
    ),
    # float32: eight bits are unpacked to it; values differ as sums are rounded
    "lora, packed, offload": Case(
        {**LORA, "quantize": "8bit"},
        ("ddp:3", "ddp:3..ddp:2"),
        {
            "train": {"precision": "f32", "ema": 0.9, "recompute": "block", "check_replicas": 2},
            "devices": {"offload_frozen": 1.0},
            "batch": {"accumulate": 2},
        },
        1e-5,
    ),
    # bfloat16 keeps three digits; a device with fewer rows multiplies other shapes
    "whole, bf16": Case(
        {},
        ("ddp:3", "fsdp:3..ddp:2"),
        {"train": {"precision": "bf16", "ema": 0.9, "recompute": "block", "check_replicas": 2}},
        2e-2,
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_what_is_switched_on_together(
    name: str, pipelines: Mapping[str, Path], pool: Pool, tmp_path: Path
) -> None:
    case = CASES[name]
    folder = write_pictures(tmp_path / "set")
    model = {"path": str(pipelines["sdxl"]), **case.model}
    whole = values(folder, model, steps=6)
    if "architecture" in case.model:
        whole |= {"model": dict(case.model), "data": {**DATA, "source": str(folder)}}
    whole["data"].pop("prompts", None)
    for section, fields in case.sections.items():
        whole[section] |= fields
    home = tmp_path / "runs"
    home.mkdir()
    check_one_curve(config_of(whole), case.layouts, pool, home, steps=6, near=case.near)
