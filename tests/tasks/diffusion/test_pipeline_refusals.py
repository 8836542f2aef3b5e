"""What is no pipeline is refused, in words that say what it is and what to do."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from pipeline_copies import INDEX, SCHEDULER, UNET, Copy
from safetensors.torch import save_file
from torch import Tensor

from samecurve.errors import UserError
from samecurve_products.pictures.diffusion.families.pipeline import open_pipeline

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
BAD: dict[str, tuple[Callable[[Copy], object], str]] = {
    "gone": (lambda copy: copy.remove(), "there is no .*, and nothing is downloaded"),
    "other": (lambda copy: copy.only("a.txt", ""), "has no model_index.json"),
    "lora": (lambda copy: copy.only("pytorch_lora_weights.safetensors", ""), "it holds a LoRA"),
    "bare": (lambda copy: copy.go_into("unet"), "it is a UNet2DConditionModel alone"),
    "language": (lambda copy: copy.only("config.json", '{"model_type": "llama"}'), "type llama"),
    "damaged": (lambda copy: copy.write(INDEX, "{"), "model_index.json can't be read"),
    "class": (lambda copy: copy.change(INDEX, _class_name="A"), "is a A, which is not trained"),
    "code": (lambda copy: copy.change(INDEX, _class_name=["a", "A"]), "own .*never run here"),
    "part": (lambda copy: copy.change(INDEX, unet=["a", "A"]), "beside a model is not run"),
    "left out": (
        lambda copy: copy.change(INDEX, text_encoder_2=[None, None]),
        "names no text_encoder_2",
    ),
    "no directory": (lambda copy: copy.remove("vae"), "has no directory vae"),
    "no weights": (lambda copy: copy.without_weights("vae"), "vae has no weights"),
    "pickle": (lambda copy: copy.without_weights("vae", "a.bin"), "as a pickle"),
    "pointer": (lambda copy: copy.weights("unet").write_text(POINTER), "Git LFS"),
    "truncated": (lambda copy: copy.cut("unet"), "ends early"),
    "no shard": (lambda copy: copy.lose_a_shard("unet"), "lacks 1 of 1 files .*: gone.safetensors"),
    "inpainting": (
        lambda copy: copy.change(UNET, in_channels=9),
        "takes 9 channels, and the VAE gives 4",
    ),
    "distilled": (lambda copy: copy.change(UNET, time_cond_proj_dim=8), "distilled for few steps"),
    "flow": (
        lambda copy: copy.change(INDEX, scheduler=["diffusers", "FlowMatchEulerDiscreteScheduler"]),
        "with which a StableDiffusionXLPipeline makes no pictures",
    ),
    "target": (
        lambda copy: copy.change(SCHEDULER, prediction_type="sample"),
        "prediction_type is sample",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_no_pipeline_is_refused(
    what: str, pipelines: Mapping[str, Path], tmp_path: Path
) -> None:
    copy = Copy(tmp_path / "pipeline")
    shutil.copytree(pipelines["sdxl"], copy.home)
    damage, message = BAD[what]
    damage(copy)
    with pytest.raises(UserError, match=message) as refused:
        _ = open_pipeline(copy.home).prediction
    assert refused.value.where == "model.path"
    assert refused.value.remedy


BAD_FILES: dict[str, tuple[dict[str, Tensor], str]] = {
    "lora": ({"unet.x.lora_A.weight": torch.zeros(1)}, "holds a LoRA"),
    "kohya": ({"lora_unet_x.lora_down.weight": torch.zeros(1)}, "holds a LoRA"),
    "control": ({"control_model.time_embed.0.weight": torch.zeros(1)}, "a ControlNet"),
    "embedding": ({"emb_params": torch.zeros(1)}, "an embedding"),
    "vae": ({"decoder.conv_in.weight": torch.zeros(1)}, "holds a VAE alone"),
    "language": ({"model.embed_tokens.weight": torch.zeros(1)}, "a language model"),
    "unknown": ({"a.b": torch.zeros(1)}, "no denoiser that is known here"),
    "quantized": (
        {"model.diffusion_model.input_blocks.0.0.weight": torch.zeros(1).to(torch.float8_e4m3fn)},
        "F8_E4M3 values",
    ),
    "second": (
        {
            "model.diffusion_model.input_blocks.0.0.weight": torch.zeros(1),
            "cond_stage_model.model.positional_embedding": torch.zeros(1),
        },
        "Stable Diffusion 2 in one file",
    ),
    "no tokenizer": (
        {"model.diffusion_model.input_blocks.0.0.weight": torch.zeros(1)},
        "has no tokenizer",
    ),
}


@pytest.mark.parametrize("what", BAD_FILES)
def test_what_is_no_checkpoint_is_refused(what: str, tmp_path: Path) -> None:
    arrays, message = BAD_FILES[what]
    save_file(arrays, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=message) as refused:
        open_pipeline(tmp_path / "model.safetensors")
    assert refused.value.where in {"model.path", "model.base"}
    assert refused.value.remedy


def test_a_pickle_is_never_read(tmp_path: Path) -> None:
    (tmp_path / "model.ckpt").write_bytes(b"cos\nsystem\n")
    with pytest.raises(UserError, match="is a pickle"):
        open_pipeline(tmp_path / "model.ckpt")


def test_a_base_must_fit_the_file(
    single_files: Mapping[str, Path], pipelines: Mapping[str, Path]
) -> None:
    with pytest.raises(UserError, match="is a StableDiffusionPipeline, and") as refused:
        open_pipeline(single_files["sdxl"], pipelines["sd15"])
    assert refused.value.where == "model.base"
    with pytest.raises(UserError, match="needs no base"):
        open_pipeline(pipelines["sdxl"], pipelines["sdxl"])
