"""New models of pixels: noise, times, crops and dropped captions follow the picture, so the curve
is one on any devices, over ragged buckets, and a resumed run equals the unbroken one.
"""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("diffusers", reason="pip install -e '.[diffusion]'")

from noise_pictures import write_pictures

from one_curve import check_one_curve
from samecurve.core.config.sections import Config
from tiny import config_of
from worlds import Pool

UNET = {"architecture": "unet", "widths": [8, 16], "head_width": 8, "text_width": 8}
DIT = {"architecture": "dit", "width": 16, "depth": 2, "head_width": 8, "text_width": 8}
DATA = {
    "resolution": 16,
    "bucket_step": 4,
    "crop": "random",
    "flip": 0.5,
    "validation": 0.2,
    "captions": {"shuffle": True, "dropout": 0.3},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("pictures") / "set")


def config(folder: Path, model: dict[str, Any] = UNET, **train: Any) -> Config:
    return config_of(
        {
            "task": "diffusion",
            "model": model,
            "data": {**DATA, "source": str(folder)},
            "batch": {"samples": 5},
            "optimizer": {"lr": 1e-2},
            "train": {"precision": "f64", "steps": 6, **train},
            "devices": {"use": "cpu"},
        }
    )


def test_devices_do_not_change_the_curve(folder: Path, pool: Pool, tmp_path: Path) -> None:
    """Over buckets that leave short steps."""
    check_one_curve(config(folder), ["ddp:3"], pool, tmp_path, steps=4, near=1e-10)


@pytest.mark.long
@pytest.mark.parametrize(
    "model",
    [
        UNET,
        DIT,
        {**UNET, "prediction": "epsilon", "min_snr": 5.0},
        {**UNET, "prediction": "v"},
        {**UNET, "time_steps": {"distribution": "logit_normal", "shift": 3.0}},
    ],
)
def test_each_objective_has_one_curve(
    model: dict[str, Any], folder: Path, pool: Pool, tmp_path: Path
) -> None:
    layouts = ["ddp:2", "dp:2", "ddp:3", "fsdp:2/4", "hsdp:4"]
    check_one_curve(config(folder, model), layouts, pool, tmp_path, steps=6, near=1e-10)


@pytest.mark.long
def test_exact_bits(folder: Path, pool: Pool, tmp_path: Path) -> None:
    here = config(folder, precision="f32", exact=True)
    check_one_curve(here, ["ddp:3"], pool, tmp_path, steps=4, near=0.0)
