"""`samecurve data show` of pictures: captions, buckets, what is left out; no picture is encoded."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps

pytest.importorskip("diffusers", reason="pip install -e '.[diffusion]'")

from picture_sets import mixed, write_folder
from tiny_pipelines import save_sd15

from samecurve.core.bucket_order import BucketOrder
from samecurve.core.config.sections import Config
from samecurve_products.page.data_show import data_blocks
from samecurve_products.preview.open_data import Split, preview
from samecurve_products.preview.parts import Picture, Value
from tiny import config_of

UNET = {"architecture": "unet", "widths": [8, 16], "head_width": 8, "text_width": 8}


def config(folder: Path, model: dict[str, Any], **data: Any) -> Config:
    fields = {"resolution": 16, "bucket_step": 4, "validation": 0.2, **data}
    return config_of(
        {
            "task": "diffusion",
            "model": model,
            "data": {"source": str(folder), **fields},
            "batch": {"samples": 3},
            "optimizer": {"lr": 1e-3},
            "train": {"steps": 2, "seed": 11},
            "devices": {"use": "cpu"},
        }
    )


def texts(blocks: Sequence[Any]) -> str:
    return "\n".join(block["text"] for block in blocks if block["type"] == "text")


def test_the_first_samples_are_those_of_step_1_with_their_captions(
    tmp_path: Path, cache: Path
) -> None:
    folder = mixed(tmp_path / "p", 30)
    seen = preview(config(folder, UNET), cache, split="train", count=2, global_batch_size=3)
    sizes = tuple(bucket.samples for bucket in seen.about.buckets)
    ids = BucketOrder(sum(sizes), 3, 11, bucket_sizes=sizes).ids(range(1))[0]
    assert [sample.id for sample in seen.samples] == ids[:2].tolist()
    assert seen.of_step == len(ids)
    for sample in seen.samples:
        values = {part.name: part.text for part in sample.of(Value)}
        number = int(values["caption"].removeprefix("number "))
        assert values["weight"] == "1"  # the time step that the model is given is no weight
        (pixels,) = (part.pixels for part in sample.of(Picture) if part.name == "pixels")
        fitted = _shown(folder, number, pixels.shape[:2])  # perhaps half a pixel aside
        assert np.corrcoef(pixels.ravel(), fitted.ravel())[0, 1] > 0.6


def _shown(folder: Path, number: int, sides: tuple[int, ...]) -> NDArray[np.int64]:
    """The middle of a picture, as Pillow itself fits it in."""
    image = Image.open(folder / f"{number:02d}.png")
    fitted = ImageOps.fit(image, (sides[1], sides[0]), Image.Resampling.LANCZOS)
    return np.asarray(fitted).astype(np.int64)


def test_the_page_counts_buckets_and_names_what_is_left_out(tmp_path: Path, cache: Path) -> None:
    del cache
    folder = write_folder(mixed(tmp_path / "p", 30), {"x.png": b"", "x.txt": "x", "a.md": "a"})
    blocks = data_blocks(config(folder, UNET, broken="skip"), samples=1)
    tables = [block for block in blocks if block["type"] == "table"]
    (buckets,) = (table for table in tables if table["head"][0] == "bucket")
    rows = {name: list(map(int, counts)) for name, *counts in buckets["rows"]}
    assert set(rows) == {"12x20", "16x16", "20x12"}
    assert all(steps == -(-samples // 3) for _, samples, steps in rows.values())
    (cards,) = (block for block in blocks if block["type"] == "cards")
    shown = {item["title"]: item["value"] for item in cards["items"]}
    assert shown["steps an epoch"] == str(sum(steps for _, _, steps in rows.values()))
    (left_out,) = (table for table in tables if table["head"][1] == "why")
    assert left_out["rows"] == [["1", "can't be read: empty: 0 bytes", "x.png"]]
    assert "30 pictures of 1 folder, 3 buckets from 12x20 to 20x12" in texts(blocks)
    assert "1 file not read: a.md" in texts(blocks)


def test_of_a_pipeline_the_pixels_are_shown_and_nothing_is_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAMECURVE_CACHE", str(tmp_path / "cache"))
    model = {"path": str(save_sd15(tmp_path / "sd"))}
    splits: tuple[Split, ...] = ("train", "eval")
    for split in splits:
        of_pipeline = config(mixed(tmp_path / split, 30), model, variants=2)
        blocks = data_blocks(of_pipeline, samples=2, split=split)
        (pictures,) = (block for block in blocks if block["type"] == "pictures")
        assert len(pictures["items"]) == 2
        assert all("caption number" in item["caption"] for item in pictures["items"])
    assert not list((tmp_path / "cache").rglob("latents/*/*"))
