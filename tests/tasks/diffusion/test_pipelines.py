"""A pipeline's denoiser, trained on latents and embeddings that ranks encode once each: one curve
on any devices, a LoRA or the whole denoiser; the same pictures; files that other programs read.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("diffusers", reason="pip install -e '.[diffusion]'")

from noise_pictures import write_pictures

from commands import samecurve
from one_curve import check_one_curve
from samecurve.core.config.sections import Config
from samecurve.core.protocols import WHOLE
from samecurve.observe import read_events
from samecurve.tasks import open_task
from tiny import config_of
from worlds import Pool

LORA = {"adapter": {"rank": 4, "dropout": 0.1}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("pictures") / "set")


def values(folder: Path, model: Mapping[str, Any], **train: Any) -> dict[str, Any]:
    return {
        "task": "diffusion",
        "model": dict(model),
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


def config(folder: Path, model: Mapping[str, Any], **train: Any) -> Config:
    return config_of(values(folder, model, **train))


@pytest.mark.long
def test_devices_do_not_change_the_curve_of_a_lora(
    folder: Path, pipelines: Mapping[str, Path], pool: Pool, tmp_path: Path
) -> None:
    here = config(folder, {"path": str(pipelines["sdxl"]), **LORA})
    check_one_curve(here, ["ddp:2", "fsdp:3"], pool, tmp_path, steps=5, near=1e-10)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["whole", "lora", "dora", "lokr"])
def test_each_family_has_one_curve(
    kind: str, folder: Path, pipelines: Mapping[str, Path], pool: Pool, tmp_path: Path
) -> None:
    adapter = {} if kind == "whole" else {"adapter": {"kind": kind, "rank": 4}}
    for family, home in pipelines.items():
        here = config(folder, {"path": str(home), **adapter})
        run = tmp_path / family
        run.mkdir()
        check_one_curve(here, ["ddp:2", "ddp:3", "fsdp:2"], pool, run, steps=5, near=1e-8)


@pytest.mark.long
def test_exact_bits(
    folder: Path, pipelines: Mapping[str, Path], pool: Pool, tmp_path: Path
) -> None:
    here = config(folder, {"path": str(pipelines["sdxl"]), **LORA}, precision="f32", exact=True)
    check_one_curve(here, ["ddp:2", "ddp:3"], pool, tmp_path, steps=5, near=0.0)


@pytest.mark.long
def test_a_lora_is_trained_shown_resumed_and_exported(
    folder: Path, pipelines: Mapping[str, Path], tmp_path: Path
) -> None:
    """Two ranks encode, train, draw and stop; one goes on; diffusers makes the same pictures of
    each exported form.
    """
    model = {"path": str(pipelines["sd15"]), **LORA}
    run = {**values(folder, model, steps=8), "optimizer": {"lr": 0.1}}
    (tmp_path / "config.json").write_text(json.dumps(run))
    train = ("train", "-f", tmp_path / "config.json", "--save-dir")
    samecurve(*train, "whole", cwd=tmp_path)
    first = samecurve(*train, "run", "--devices", "cpu:2", "--stop-after", 4, cwd=tmp_path)
    assert "encoded in" not in first.stdout  # the first run has encoded everything
    samecurve(*train, "run", cwd=tmp_path)
    whole, again = (
        [
            event.values["loss"]
            for event in read_events(tmp_path / name / "journal.jsonl")
            if event.kind == "step"
        ]
        for name in ("whole", "run")
    )
    np.testing.assert_allclose(whole, again, rtol=1e-9)
    drawn = [
        np.asarray(Image.open(tmp_path / name / "samples" / "step-00000008-1.png")).astype(int)
        for name in ("whole", "run")
    ]
    assert np.abs(drawn[0] - drawn[1]).max() <= 1  # where a shade lies between two
    for form in ("diffusers", "lora", "lora-diffusers"):
        samecurve("export", "run", "--format", form, "--to", form, "--dtype", "f32", cwd=tmp_path)
    merged = picture(tmp_path / "diffusers")
    base = pipelines["sd15"]
    for adapter in ("lora/lora.safetensors", "lora-diffusers"):
        np.testing.assert_allclose(picture(base, tmp_path / adapter), merged, atol=2e-5)
    assert np.abs(picture(base) - merged).max() > 1e-3  # the adapter has learnt something


def picture(pipeline: Path, adapter: Path | None = None) -> Any:
    """A picture that diffusers makes by itself."""
    import torch

    from samecurve_products.pictures.diffusion.families.library import library

    opened: Any = library("diffusers").DiffusionPipeline.from_pretrained(
        pipeline, local_files_only=True
    )
    opened.set_progress_bar_config(disable=True)
    if adapter is not None:
        opened.load_lora_weights(adapter)
    return opened(
        "one",
        num_inference_steps=2,
        height=32,
        width=32,
        generator=torch.Generator().manual_seed(0),
        output_type="np",
    ).images[0]


def test_an_encoding_has_one_file_whatever_the_threads(
    pipelines: Mapping[str, Path], tmp_path: Path
) -> None:
    """One device has all cores, each of several has fewer; a picture large enough to tell."""
    import torch

    colours = np.random.default_rng(0).integers(0, 256, (256, 256, 3), np.uint8)
    (tmp_path / "set").mkdir()
    for number in range(2):
        Image.fromarray(np.roll(colours, number)).save(tmp_path / "set" / f"{number}.png")
        (tmp_path / "set" / f"{number}.txt").write_text("noise")
    run = values(tmp_path / "set", {"path": str(pipelines["sdxl"])})
    run["data"] |= {"resolution": 256, "validation": 0, "prompts": []}
    before, kept = torch.get_num_threads(), []
    for threads in (1, 2):
        cache = tmp_path / f"cache-{threads}"
        prepare = open_task(config_of(run), cache).prepare
        assert prepare is not None
        torch.set_num_threads(threads)
        try:
            assert list(prepare("cpu", WHOLE))[-1] == (6, 6)
        finally:
            torch.set_num_threads(before)
        files = sorted(cache.rglob("*.safetensors"))
        kept.append([file.read_bytes() for file in files])
    assert kept[0] == kept[1]
