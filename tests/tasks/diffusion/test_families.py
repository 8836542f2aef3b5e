"""A family does what the library's own pipeline does, and each row alone.

Tiny pipelines with random weights are made here; nothing is downloaded.
"""

import json
import shutil
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import original_files
import pytest
import tiny_pipelines
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from samecurve.errors import UserError
from samecurve.tasks.diffusion.families.denoising import denoise, sample
from samecurve.tasks.diffusion.families.export import export_denoiser
from samecurve.tasks.diffusion.families.loading import (
    Parts,
    build_denoiser,
    library,
    load_model,
)
from samecurve.tasks.diffusion.families.opened import OpenedPipeline
from samecurve.tasks.diffusion.families.original_layout import convert_denoiser
from samecurve.tasks.diffusion.families.original_models import ORIGINAL_MODELS
from samecurve.tasks.diffusion.families.pipeline import family_of, open_pipeline
from samecurve.torch_engine.model.weight_files import WeightArray, read_weights

# diffusers' own schedulers, with newer numpy
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

ALL = ["sd15", "sdxl", "z_image", "sd3", "flux"]
OF_ONE_FILE = {"sd15": {1}, "sdxl": {0}}  # the upward levels of the UNet that have attention
CAPTIONS = ["a red cat, sitting", "", "two blue houses " * 20]


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A pipeline of each family, as diffusers saves it."""
    library("diffusers")
    root = tmp_path_factory.mktemp("pipelines")
    return {name: getattr(tiny_pipelines, f"save_{name}")(root / name) for name in ALL}


@pytest.fixture(scope="module")
def files(homes: Mapping[str, Path]) -> dict[str, Path]:
    """The same pipelines as one file each, in the layout of the models' authors."""
    return {
        name: original_files.save_original(
            homes[name], homes[name].with_suffix(".safetensors"), attended_ups=ups
        )
        for name, ups in OF_ONE_FILE.items()
    }


class Ready:
    """A family with its parts and its denoiser in float64."""

    def __init__(self, opened: OpenedPipeline) -> None:
        self.opened = opened
        self.family = family_of(opened)
        self.parts = Parts(opened, dtype=torch.float64)
        self.denoiser = load_model(opened, opened.kind.component, torch.float64)

    def conditions(self, captions: list[str]) -> dict[str, Tensor]:
        encoded = self.family.encode_captions(self.parts, captions)
        conditions = dict(self.family.with_guidance(encoded, 1.0))
        told = self.family.size_conditions(original=(40, 50), corner=(3, 4), size=(32, 48))
        for name, row in told.items():
            conditions[name] = torch.tensor([row] * len(captions))
        return conditions

    def times(self, count: int) -> Tensor:
        if self.family.schedule.prediction == "flow":
            return torch.linspace(0.1, 0.9, count, dtype=torch.float64)
        return torch.linspace(1, 990, count).long()


@pytest.fixture(scope="module", params=ALL)
def ready(request: pytest.FixtureRequest, homes: Mapping[str, Path]) -> Ready:
    torch.manual_seed(1)
    return Ready(open_pipeline(homes[request.param]))


def one_row(values: Mapping[str, Tensor], row: int) -> dict[str, Tensor]:
    return {name: tensor[row : row + 1] for name, tensor in values.items()}


def test_a_caption_alone_is_encoded_as_in_a_batch(ready: Ready) -> None:
    together = ready.family.encode_captions(ready.parts, CAPTIONS)
    for row, caption in enumerate(CAPTIONS):
        alone = ready.family.encode_captions(ready.parts, [caption])
        for name, values in one_row(together, row).items():
            torch.testing.assert_close(alone[name], values, rtol=1e-12, atol=1e-12)


def test_a_row_is_predicted_alone_as_in_a_batch(ready: Ready) -> None:
    shape = ready.family.latent_shape(32, 48)
    noisy = torch.randn(3, *shape, dtype=torch.float64)
    conditions, times = ready.conditions(CAPTIONS), ready.times(3)
    with torch.no_grad():
        together = ready.family.predict(ready.denoiser, noisy, times, conditions)
        assert together.shape == noisy.shape
        for row in range(3):
            alone = ready.family.predict(
                ready.denoiser, noisy[row : row + 1], times[row : row + 1], one_row(conditions, row)
            )
            torch.testing.assert_close(alone, together[row : row + 1], rtol=1e-10, atol=1e-10)


def own_pipeline(opened: OpenedPipeline) -> Any:
    """The library's own pipeline, in float64."""
    diffusers = library("diffusers")
    options = {"add_watermarker": False} if "XL" in opened.kind.pipeline else {}
    pipeline = diffusers.DiffusionPipeline.from_pretrained(
        opened.place, local_files_only=True, **options
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(torch.float64)


def own_latents(ready: Ready, noise: Tensor, steps: int, guidance: float, **options: Any) -> Tensor:
    """Scaled latents that the library's own pipeline makes of noise."""
    _, _, height, width = noise.shape
    factor = ready.opened.factor
    pipeline = own_pipeline(ready.opened)
    is_packed = ready.opened.kind.name == "FLUX.1"
    if is_packed:
        noise = pipeline._pack_latents(noise, *noise.shape)
    latents: Tensor = pipeline(
        CAPTIONS[0],
        height=height * factor,
        width=width * factor,
        num_inference_steps=steps,
        guidance_scale=guidance,
        latents=noise,
        output_type="latent",
        **options,
    ).images
    if is_packed:
        latents = pipeline._unpack_latents(latents, height * factor, width * factor, factor)
    return latents


@pytest.mark.parametrize("guidance", [0.0, 4.0])
def test_pictures_are_the_pipelines_own(ready: Ready, guidance: float) -> None:
    """Prediction, sign and time are right: otherwise the library's scheduler would go elsewhere."""
    noise = torch.randn(1, *ready.family.latent_shape(32, 48), dtype=torch.float64)
    ours = denoise(
        ready.family,
        ready.denoiser,
        noise,
        conditions=ready.family.encode_captions(ready.parts, CAPTIONS[:1]),
        negative=ready.family.encode_negative(ready.parts, ""),
        steps=4,
        guidance=guidance,
    )
    theirs = own_latents(ready, noise, 4, guidance)
    # Z-Image rounds latents to float32 in each step
    torch.testing.assert_close(ours, theirs.double(), rtol=1e-5, atol=1e-5)
    again = denoise(
        ready.family,
        ready.denoiser,
        noise,
        conditions=ready.family.encode_captions(ready.parts, CAPTIONS[:1]),
        negative=None,
        steps=1,
    )
    assert not torch.allclose(again, ours)


def test_latents_are_scaled_and_back(ready: Ready) -> None:
    """The mean of a picture's latents, unscaled, is what the VAE itself makes of the picture."""
    pixels = torch.rand(2, 3, 32, 48, dtype=torch.float64) * 2 - 1
    moments = ready.family.encode_pictures(ready.parts, pixels)
    assert moments.shape[:2] == (2, 2)
    assert moments.shape[2:] == ready.family.latent_shape(32, 48)
    vae = ready.parts["vae"]
    with torch.no_grad():
        own = vae.encode(pixels).latent_dist
        decoded = vae.decode(own.mean).sample
    torch.testing.assert_close(ready.family.decode_latents(ready.parts, moments[:, 0]), decoded)
    assert (moments[:, 1] > 0).all()


def test_a_sample_is_a_picture(ready: Ready) -> None:
    noise = torch.randn(1, *ready.family.latent_shape(32, 48), dtype=torch.float64)
    conditions = ready.family.encode_captions(ready.parts, CAPTIONS[:1])
    pictures = sample(
        ready.family,
        ready.parts,
        ready.denoiser,
        noise,
        conditions=conditions,
        negative=conditions,
        steps=2,
    )
    assert pictures.shape == (1, 3, 32, 48)
    assert pictures.abs().max() <= 1


def test_the_denoiser_is_built_without_weights(ready: Ready) -> None:
    """Names and shapes are those of the files that its weights are read from."""
    with torch.device("meta"):
        outline = build_denoiser(ready.opened)
    arrays, _ = read_weights(ready.opened.denoiser_place)
    assert {name: tuple(p.shape) for name, p in outline.state_dict().items()} == {
        name: array.shape for name, array in arrays.items()
    }


def test_parts_are_loaded_when_they_are_asked_for(
    homes: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is looked for outside the directory."""
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a network call"))
    opened = open_pipeline(homes["sdxl"])
    shutil.copytree(homes["sdxl"], homes["sdxl"].with_name("lazy"), dirs_exist_ok=True)
    parts = Parts(open_pipeline(homes["sdxl"].with_name("lazy")))
    assert parts["vae"] is parts["vae"]
    shutil.rmtree(homes["sdxl"].with_name("lazy") / "vae")
    assert not parts["vae"].training
    assert not any(p.requires_grad for p in parts["text_encoder"].parameters())
    parts.release("vae")
    with pytest.raises(UserError, match="vae"):
        parts["vae"]
    assert family_of(opened).encode_captions(parts, ["a"])["pooled"].shape == (1, 24)


@pytest.mark.parametrize("name", OF_ONE_FILE)
def test_one_file_is_the_directory(
    name: str, homes: Mapping[str, Path], files: Mapping[str, Path]
) -> None:
    """Weights, captions and latents have the same bits from the file as from the directory."""
    from_directory, from_file = (
        open_pipeline(homes[name]),
        open_pipeline(files[name], homes[name]),
    )
    own = load_model(from_directory, "unet", torch.float32).state_dict()
    converted = convert_denoiser(from_file, read_weights(from_file.denoiser_place)[0])
    assert converted.keys() == own.keys()
    for key, value in own.items():
        assert converted[key].shape == value.shape
        assert torch.equal(torch.from_numpy(converted[key].read()), value)
    family, parts = family_of(from_file), (Parts(from_directory), Parts(from_file))
    pixels = torch.rand(1, 3, 32, 32)
    captions = [family.encode_captions(each, CAPTIONS[:1]) for each in parts]
    assert all(torch.equal(captions[0][key], captions[1][key]) for key in captions[0])
    moments = [family.encode_pictures(each, pixels) for each in parts]
    assert torch.equal(*moments)
    assert torch.equal(*[family.decode_latents(each, moments[0][:, 0]) for each in parts])
    # names of a run's own weights stay as they are
    assert convert_denoiser(from_file, converted).keys() == own.keys()


@pytest.mark.parametrize(
    ("name", "prefix"),
    [("z_image", ""), ("z_image", "model.diffusion_model."), ("sd3", "model.diffusion_model.")],
)
def test_a_denoiser_alone_in_a_file(
    name: str, prefix: str, homes: Mapping[str, Path], tmp_path: Path
) -> None:
    """Its joined arrays are split when they are read; all else is the base's, and that is said."""
    file = original_files.save_denoiser(homes[name], tmp_path / "model.safetensors", prefix)
    opened = open_pipeline(file, homes[name])
    assert {note.split(":")[0] for note in opened.notes} == {"vae", *opened.encoders}
    converted = convert_denoiser(opened, read_weights(opened.denoiser_place)[0])
    own = load_model(open_pipeline(homes[name]), "transformer", torch.float32).state_dict()
    assert converted.keys() == own.keys()
    for key, value in own.items():
        assert converted[key].shape == value.shape
        assert np.array_equal(converted[key].read(), value.numpy())
    loaded = load_model(opened, "transformer", torch.float32).state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in own.items())
    with pytest.raises(UserError, match="in one file, which has no configs"):
        open_pipeline(file)


def test_names_of_flux_in_one_file(homes: Mapping[str, Path], tmp_path: Path) -> None:
    """The library converts the published width alone: names and shapes are compared."""
    home = tmp_path / "flux"
    shutil.copytree(homes["flux"], home)
    wide = {"attention_head_dim": 128, "num_attention_heads": 24, "axes_dims_rope": [16, 56, 56]}
    Copy(home).change("transformer/config.json", **wide)
    with torch.device("meta"):
        own = build_denoiser(open_pipeline(home)).state_dict()
    file = original_files.save_denoiser(homes["flux"], tmp_path / "model.safetensors")
    arrays = {
        name: WeightArray("float32", tuple(tensor.shape), np.zeros(0).copy)
        for name, tensor in original_files.flux_arrays(own).items()
    }
    converted = convert_denoiser(open_pipeline(file, home), arrays)
    assert {name: array.shape for name, array in converted.items()} == {
        name: tuple(tensor.shape) for name, tensor in own.items()
    }


def test_published_sizes() -> None:
    """The configs that stand for a file without any build the published models."""
    sizes = {
        ("StableDiffusionPipeline", "unet"): 859_520_964,
        ("StableDiffusionPipeline", "vae"): 83_653_863,
        ("StableDiffusionPipeline", "text_encoder"): 123_060_480,
        ("StableDiffusionXLPipeline", "unet"): 2_567_463_684,
        ("StableDiffusionXLPipeline", "vae"): 83_653_863,
        ("StableDiffusionXLPipeline", "text_encoder_2"): 694_659_840,
    }
    for (pipeline, component), size in sizes.items():
        name, class_name, config = ORIGINAL_MODELS[pipeline][component]
        model_class = getattr(library(name), class_name)
        with torch.device("meta"):
            if name == "transformers":
                model: nn.Module = model_class(model_class.config_class(**config))
            else:
                model = model_class.from_config(dict(config))
        assert sum(p.numel() for p in model.parameters()) == size


@pytest.mark.parametrize("name", ALL)
def test_an_export_makes_the_same_pictures(
    name: str, homes: Mapping[str, Path], tmp_path: Path
) -> None:
    opened = open_pipeline(homes[name])
    denoiser = build_denoiser(opened)
    export_denoiser(opened, denoiser.state_dict(), tmp_path, largest=100_000)
    assert len(list((tmp_path / opened.kind.component).glob("*.safetensors"))) > 1
    again = own_pipeline(open_pipeline(tmp_path))
    read = getattr(again, opened.kind.component).state_dict()
    for key, value in denoiser.state_dict().items():
        assert torch.equal(read[key], value.double())
    for component in ("vae", *opened.encoders):
        (file,) = (homes[name] / component).glob("*.safetensors")
        assert (tmp_path / component / file.name).read_bytes() == file.read_bytes()


def test_a_base_of_a_tokenizer_alone(
    files: Mapping[str, Path], homes: Mapping[str, Path], tmp_path: Path
) -> None:
    """Such a base is enough for the published sizes; another size is then refused."""
    opened = open_pipeline(files["sdxl"], homes["sdxl"] / "tokenizer")
    tokenizers = [Parts(opened)[name] for name in ("tokenizer", "tokenizer_2")]
    assert [tokenizer.pad_token for tokenizer in tokenizers] == ["<|endoftext|>", "!"]
    with pytest.raises(UserError, match="the files of vae lack"):
        Parts(opened)["vae"]
    with pytest.raises(UserError, match="the files of text_encoder_2 "):
        Parts(opened)["text_encoder_2"]
    with pytest.raises(UserError, match=r"neither model_index\.json nor a tokenizer"):
        open_pipeline(files["sdxl"], tmp_path)


def test_a_file_may_say_that_it_predicts_v(homes: Mapping[str, Path], tmp_path: Path) -> None:
    file = original_files.save_original(
        homes["sdxl"],
        tmp_path / "v.safetensors",
        attended_ups={0},
        extra={"v_pred": torch.zeros(0), "ztsnr": torch.zeros(0)},
    )
    opened = open_pipeline(file, homes["sdxl"])
    assert opened.prediction == "v"
    assert any("v_pred" in note for note in opened.notes)
    alphas = family_of(opened).schedule.alphas_cumprod
    assert alphas is not None
    assert alphas[-1] < 1e-6


def test_no_caption_is_zeros_for_sdxl(homes: Mapping[str, Path]) -> None:
    opened = open_pipeline(homes["sdxl"])
    family, parts = family_of(opened), Parts(opened)
    nothing, something = (family.encode_negative(parts, text) for text in ("", "blurry"))
    assert not any(values.any() for values in nothing.values())
    assert all(values.any() for values in something.values())


def test_latents_without_a_deviation(homes: Mapping[str, Path]) -> None:
    """The deviation is zero where a VAE gives one value a place."""
    vae = library("diffusers").AutoencoderTiny(
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1),
    )
    family = family_of(open_pipeline(homes["sd15"]))
    moments = family.encode_pictures({"vae": vae}, torch.rand(1, 3, 32, 32))
    assert not moments[:, 1].any()
    assert moments[:, 0].any()


class Copy:
    """A copy of a pipeline's directory, and what may be wrong with it."""

    def __init__(self, home: Path) -> None:
        self.home = home  # what is opened

    def weights(self, component: str) -> Path:
        return self.home / component / "diffusion_pytorch_model.safetensors"

    def write(self, name: str, text: str) -> None:
        (self.home / name).write_text(text)

    def only(self, name: str, text: str) -> None:
        """Nothing but one file."""
        self.remove()
        self.home.mkdir()
        self.write(name, text)

    def remove(self, component: str = "") -> None:
        shutil.rmtree(self.home / component)

    def without_weights(self, component: str, instead: str = "config.json") -> None:
        self.weights(component).unlink()
        (self.home / component / instead).touch()

    def change(self, name: str, **values: Any) -> None:
        file = self.home / name
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    def cut(self, component: str) -> None:
        content = self.weights(component).read_bytes()
        self.weights(component).write_bytes(content[: len(content) // 2])

    def lose_a_shard(self, component: str) -> None:
        self.weights(component).unlink()
        index = {"weight_map": {"conv_in.weight": "gone.safetensors"}}
        self.write(f"{component}/diffusion_pytorch_model.safetensors.index.json", json.dumps(index))

    def go_into(self, component: str) -> None:
        self.home /= component


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
INDEX, UNET, SCHEDULER = "model_index.json", "unet/config.json", "scheduler/scheduler_config.json"
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
    "target": (
        lambda copy: copy.change(SCHEDULER, prediction_type="sample"),
        "prediction_type is sample",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_no_pipeline_is_refused(
    what: str, homes: Mapping[str, Path], tmp_path: Path
) -> None:
    copy = Copy(tmp_path / "pipeline")
    shutil.copytree(homes["sdxl"], copy.home)
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


def test_a_base_must_fit_the_file(files: Mapping[str, Path], homes: Mapping[str, Path]) -> None:
    with pytest.raises(UserError, match="is a StableDiffusionPipeline, and") as refused:
        open_pipeline(files["sdxl"], homes["sd15"])
    assert refused.value.where == "model.base"
    with pytest.raises(UserError, match="needs no base"):
        open_pipeline(homes["sdxl"], homes["sdxl"])


def test_arrays_that_are_missing_are_no_random_values(
    homes: Mapping[str, Path], tmp_path: Path
) -> None:
    home = tmp_path / "pipeline"
    shutil.copytree(homes["sd15"], home)
    for component, file in (("vae", "diffusion_pytorch_model"), ("text_encoder", "model")):
        path = home / component / f"{file}.safetensors"
        tensors = load_file(path)
        lost = sorted(tensors)[0]
        save_file({k: v for k, v in tensors.items() if k != lost}, path, {"format": "pt"})
        with pytest.raises(UserError, match=f"lack .*{lost}"):
            Parts(open_pipeline(home))[component]
