"""The presets for cards of 8, 16, 24 and 80 GB: planned with models of the published sizes."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

pytest.importorskip("diffusers", reason="pip install -e '.[diffusion]'")

import full_size_pipelines
import torch
from noise_pictures import write_pictures
from onetrainer_presets import PRESETS as OF_ONETRAINER
from onetrainer_presets import values_of_preset
from torch._subclasses.fake_tensor import FakeTensorMode

from commands import samecurve
from live_bytes import LiveBytes

ROOT = Path(__file__).parents[3]
GIB = 1 << 30
MOST = 0.9  # of a card: libraries, gaps and a desktop have the rest
# preset -> the pipeline that it is planned with
PRESETS = {
    "lora-sdxl-8gb": "sdxl",
    "lora-sdxl": "sdxl",
    "lora-flow-16gb": "z_image",
    "lora-flow": "z_image",
    "full-sdxl-80gb": "sdxl",
    "full-flow-80gb": "z_image",
}
_CARD = re.compile(r"([\d.]+) GiB on an (RTX \d+|A100)")
_PLANNED = re.compile(r"memory ([\d.]+) GiB of ([\d.]+) GiB a device")
_HELD = re.compile(r"\(estimate\): ([\d.]+) GiB held")
_SAMPLE = re.compile(r"a sample adds (\d\.\d) GiB")


@pytest.fixture(scope="module")
def full_size(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    home = tmp_path_factory.mktemp("full size")
    return {
        "sdxl": full_size_pipelines.save_sdxl(home / "sdxl"),
        "z_image": full_size_pipelines.save_z_image(home / "z_image"),
    }


def drawing() -> float:
    """GiB that a picture of 1024x1024 needs beside the model: as the docs say."""
    found = _SAMPLE.search((ROOT / "docs/diffusion.md").read_text())
    assert found
    return float(found[1])


@pytest.mark.long
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_fits_its_card(name: str, full_size: Mapping[str, Path], tmp_path: Path) -> None:
    """Training and drawing a sample take what the preset and the docs say."""
    file = ROOT / "models" / f"{name}.yaml"
    said = [(float(size), card) for size, card in _CARD.findall(file.read_text())]
    assert said
    page = (ROOT / "docs/diffusion.md").read_text()
    pictures = write_pictures(tmp_path / "pictures")
    options = ["-f", file, "-d", pictures, "--set", f"model.path={full_size[PRESETS[name]]}"]
    options += ["--set", "data.buckets=false"]  # the pictures are squares
    for size, card in said:
        machine = f"1x{card.replace(' ', '')}"
        output = samecurve("plan", *options, "--machine", machine, cwd=tmp_path).stdout
        planned, memory = map(float, _PLANNED.search(output).groups())  # type: ignore[union-attr]
        assert planned == size
        assert planned < MOST * memory
        held = float(_HELD.search(output)[1])  # type: ignore[index]
        assert held + drawing() < MOST * memory
        assert re.search(rf"\| `{name}.yaml` \|.*\b{re.escape(f'{size} GiB on an {card}')}", page)


@pytest.mark.long
def test_onetrainers_preset_for_8_gb_fits_8_gb(
    full_size: Mapping[str, Path], tmp_path: Path
) -> None:
    """Its share of layers in host memory is read, and that they are computed again."""
    preset = next(preset for preset in OF_ONETRAINER if preset.name == "z-image LoRA 8GB")
    values = {
        **values_of_preset(preset),
        "base_model_name": str(full_size["z_image"]),
        "concepts": [{"path": str(write_pictures(tmp_path / "pictures"))}],
    }
    (tmp_path / "old.json").write_text(json.dumps(values))
    line = ("plan", "-f", "old.json", "--machine", "1xRTX3070")
    output = samecurve(*line, cwd=tmp_path).stdout
    assert "offload: the frozen weights of 17 of 34 blocks" in output  # 30 layers, 2 + 2 refiners
    planned, memory = map(float, _PLANNED.search(output).groups())  # type: ignore[union-attr]
    assert planned < MOST * memory


def test_every_preset_for_a_card_is_planned_here() -> None:
    names = {file.stem for file in (ROOT / "models").glob("*.yaml")}
    assert {name for name in names if re.search(r"sdxl|flow|-\d+gb$", name)} == set(PRESETS)


def test_what_drawing_a_sample_adds() -> None:
    """The VAE's weights in float32, and the most that lives while it decodes."""
    with FakeTensorMode(), torch.no_grad():
        vae = full_size_pipelines.sdxl_vae().eval()
        with LiveBytes() as live:
            vae.decode(torch.empty(1, 4, 128, 128))
        weights = sum(4 * parameter.numel() for parameter in vae.parameters())
    assert round((weights + live.peak) / GIB, 1) == drawing()
