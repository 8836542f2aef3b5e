"""A pipeline's denoiser, trained on latents and embeddings that ranks encode once each: one curve
on any devices, a LoRA or the whole denoiser.
"""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("diffusers", reason="pip install 'samecurve[diffusion]'")

from one_curve import check_one_curve
from picture_folders import write_pictures
from samecurve.core.config.sections import Config
from tiny import config_of
from tiny_pipelines import save_sd15, save_sdxl
from worlds import Pool


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("pictures") / "set")


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("pipelines")
    save_sdxl(home / "sdxl")
    save_sd15(home / "sd15")
    return home


def config(folder: Path, model: dict[str, Any], **train: Any) -> Config:
    return config_of(
        {
            "task": "diffusion",
            "model": model,
            "data": {
                "source": str(folder),
                "resolution": 32,
                "bucket_step": 16,
                "crop": "random",
                "flip": 0.5,
                "variants": 2,
                "validation": 0.2,
                "captions": {"shuffle": True, "dropout": 0.3},
                "prompts": ["one", "two", "three"],
                "sample_steps": 2,
            },
            "batch": {"samples": 5},
            "optimizer": {"lr": 1e-3},
            "train": {"precision": "f64", "steps": 5, **train},
            "devices": {"use": "cpu"},
        }
    )


def test_devices_do_not_change_the_curve(
    folder: Path, pipelines: Path, pool: Pool, tmp_path: Path
) -> None:
    here = config(folder, {"path": str(pipelines / "sdxl")})
    check_one_curve(here, ["ddp:2", "ddp:3", "fsdp:2"], pool, tmp_path, steps=5, near=1e-10)
