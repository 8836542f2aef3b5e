"""A LoRA on a denoiser in host memory (devices.offload_frozen): no bit changes, nor do pictures."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("diffusers", reason="pip install -e '.[diffusion]'")

import tiny_pipelines
import torch
from full_size_pipelines import sdxl_unet
from noise_pictures import write_pictures
from PIL import Image
from test_pipelines import LORA, values

from samecurve.checkpoint.format import load
from samecurve.core.planning.memory import packed_bytes
from samecurve.tasks import open_task
from samecurve.torch_engine.model.frozen_blocks import frozen_blocks
from samecurve.torch_engine.model.model_setup import name_blocks, repeated_blocks
from samecurve_products.pictures.diffusion.whole_modules import whole_modules
from starts import start, train
from tiny import config_of
from worlds import Pool


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch's RMSNorm
@pytest.mark.parametrize("family", tiny_pipelines.ALL)
def test_no_bit_changes(
    family: str, pipelines: Mapping[str, Path], pool: Pool, tmp_path: Path, cache: Path
) -> None:
    """Exact, so that arrays are aligned alike. Blocks run again in backward, too."""
    folder = write_pictures(tmp_path / "set")
    left: list[Any] = []
    for share in (0.0, 1.0):
        model = {"path": str(pipelines[family]), **LORA, "quantize": "bf16"}
        here = values(folder, model, exact=True, recompute="block")
        here["train"] |= {"precision": "f32", "steps": 2}
        here["devices"] = {"use": "cpu:2", "preflight": 0, "offload_frozen": share}
        prepared = start(tmp_path / f"{share}", here, cache)
        assert ("offload" in prepared.plan.reasons) == bool(share)
        losses = train(pool, prepared)
        last = max(prepared.run.checkpoints.glob("step-*"))
        drawn = sorted((prepared.run.home / "samples").glob("*.png"))
        assert drawn
        pictures = [np.asarray(Image.open(path)).tobytes() for path in drawn]
        arrays = {name: array.tobytes() for name, array in load(last).arrays.items()}
        left.append((losses, pictures, arrays))
    assert left[0] == left[1]


def test_a_lora_in_bf16_is_planned(pipelines: Mapping[str, Path], tmp_path: Path) -> None:
    """Its base is packed, and has its FLOPs and its blocks counted."""
    folder = write_pictures(tmp_path / "set")
    here = values(folder, {"path": str(pipelines["sd15"]), **LORA}, precision="bf16")
    facts = open_task(config_of(here), str(tmp_path / "cache")).facts()
    assert facts.flops_per_sample
    assert facts.quantized.packed
    assert sum(facts.model.frozen_block_packed) > 0.8 * packed_bytes(facts)


def test_the_blocks_of_sdxl_are_small() -> None:
    """Its largest stage has 1.2 billion numbers: as blocks, stages would save next to nothing."""
    with torch.device("meta"):
        unet = sdxl_unet().requires_grad_(False)
    total = sum(p.numel() for p in unet.parameters())
    stages = [sum(p.numel() for p in block.parameters()) for block in repeated_blocks(unet)]
    assert max(stages) == 1_206_568_960
    name_blocks(whole_modules(unet))
    for blocks in (
        [block.parameters for block in frozen_blocks(unet)],
        [list(block.parameters()) for block in repeated_blocks(unet)],
    ):
        sizes = [sum(p.numel() for p in block) for block in blocks]
        assert (len(sizes), max(sizes)) == (91, 49_164_800)
        assert sum(sizes) > 0.98 * total
