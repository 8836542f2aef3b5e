"""Pipelines in directories and in single files: what is read of them, and what is written."""

import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import original_files
import pytest
import tiny_pipelines
import torch
from pipeline_copies import Copy, own_pipeline
from safetensors.torch import load_file, save_file
from torch import nn

from samecurve.errors import UserError
from samecurve.run.export_weights import write_weights
from samecurve.tasks.protocol import ExportedFile
from samecurve.torch_engine.model.weight_files import WeightArray, read_weights
from samecurve_products.pictures.diffusion.families.export import DENOISER_FILE, write_surroundings
from samecurve_products.pictures.diffusion.families.library import library
from samecurve_products.pictures.diffusion.families.loading import Parts, build_denoiser, load_model
from samecurve_products.pictures.diffusion.families.opened import OpenedPipeline
from samecurve_products.pictures.diffusion.families.original_layout import convert_denoiser
from samecurve_products.pictures.diffusion.families.original_models import ORIGINAL_MODELS
from samecurve_products.pictures.diffusion.families.pipeline import family_of, open_pipeline

# diffusers' own schedulers, with newer numpy
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.mark.parametrize("name", tiny_pipelines.ALL)
def test_the_denoiser_is_built_without_weights(name: str, pipelines: Mapping[str, Path]) -> None:
    """Names and shapes are those of the files that its weights are read from."""
    opened = open_pipeline(pipelines[name])
    with torch.device("meta"):
        outline = build_denoiser(opened)
    arrays, _ = read_weights(opened.denoiser_place)
    assert {name: tuple(p.shape) for name, p in outline.state_dict().items()} == {
        name: array.shape for name, array in arrays.items()
    }


def test_parts_are_loaded_when_they_are_asked_for(
    pipelines: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is looked for outside the directory."""
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a network call"))
    opened = open_pipeline(pipelines["sdxl"])
    shutil.copytree(pipelines["sdxl"], pipelines["sdxl"].with_name("lazy"), dirs_exist_ok=True)
    parts = Parts(open_pipeline(pipelines["sdxl"].with_name("lazy")))
    assert parts["vae"] is parts["vae"]
    shutil.rmtree(pipelines["sdxl"].with_name("lazy") / "vae")
    assert not parts["vae"].training
    assert not any(p.requires_grad for p in parts["text_encoder"].parameters())
    parts.release("vae")
    with pytest.raises(UserError, match="vae"):
        parts["vae"]
    assert family_of(opened).encode_captions(parts, ["a"])["pooled"].shape == (1, 24)


def test_opening_a_pipeline_imports_no_engine(pipelines: Mapping[str, Path]) -> None:
    code = (
        "import sys; from pathlib import Path;"
        "from samecurve_products.pictures.diffusion.families.pipeline import open_pipeline;"
        "opened = open_pipeline(Path(sys.argv[1]));"
        "print(opened.multiple, opened.prediction, 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(pipelines["flux"])]
    ended = subprocess.run(command, check=True, capture_output=True, text=True)
    assert ended.stdout.split() == ["4", "flow", "False"]


@pytest.mark.parametrize("name", original_files.OF_ONE_FILE)
def test_one_file_is_the_directory(
    name: str, pipelines: Mapping[str, Path], single_files: Mapping[str, Path]
) -> None:
    """Weights, captions and latents have the same bits from the file as from the directory."""
    from_directory, from_file = (
        open_pipeline(pipelines[name]),
        open_pipeline(single_files[name], pipelines[name]),
    )
    own = load_model(from_directory, "unet", torch.float32).state_dict()
    converted = convert_denoiser(from_file, read_weights(from_file.denoiser_place)[0])
    assert converted.keys() == own.keys()
    for key, value in own.items():
        assert converted[key].shape == value.shape
        assert torch.equal(torch.from_numpy(converted[key].read()), value)
    family, parts = family_of(from_file), (Parts(from_directory), Parts(from_file))
    pixels = torch.rand(1, 3, 32, 32)
    captions = [family.encode_captions(each, ["a red cat"]) for each in parts]
    assert all(torch.equal(captions[0][key], captions[1][key]) for key in captions[0])
    moments = [family.encode_pictures(each, pixels) for each in parts]
    assert torch.equal(*moments)
    assert torch.equal(*[family.decode_latents(each, moments[0][:, 0]) for each in parts])
    # names of a run's own weights stay as they are
    assert convert_denoiser(from_file, converted).keys() == own.keys()


@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        ("z_image", ""),
        ("z_image", "model.diffusion_model."),
        ("sd3", "model.diffusion_model."),
        ("flux2", "model.diffusion_model."),
    ],
)
def test_a_denoiser_alone_in_a_file(
    name: str, prefix: str, pipelines: Mapping[str, Path], tmp_path: Path
) -> None:
    """Its joined arrays are split when they are read; all else is the base's, and that is said."""
    file = original_files.save_denoiser(pipelines[name], tmp_path / "model.safetensors", prefix)
    opened = open_pipeline(file, pipelines[name])
    assert {note.split(":")[0] for note in opened.notes} == {"vae", *opened.encoders}
    converted = convert_denoiser(opened, read_weights(opened.denoiser_place)[0])
    own = load_model(open_pipeline(pipelines[name]), "transformer", torch.float32).state_dict()
    assert converted.keys() == own.keys()
    for key, value in own.items():
        assert converted[key].shape == value.shape
        assert np.array_equal(converted[key].read(), value.numpy())
    loaded = load_model(opened, "transformer", torch.float32).state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in own.items())
    with pytest.raises(UserError, match="in one file, which has no configs"):
        open_pipeline(file)


def test_names_of_flux_in_one_file(pipelines: Mapping[str, Path], tmp_path: Path) -> None:
    """The library converts the published width alone: names and shapes are compared."""
    home = tmp_path / "flux"
    shutil.copytree(pipelines["flux"], home)
    wide = {"attention_head_dim": 128, "num_attention_heads": 24, "axes_dims_rope": [16, 56, 56]}
    Copy(home).change("transformer/config.json", **wide)
    with torch.device("meta"):
        own = build_denoiser(open_pipeline(home)).state_dict()
    file = original_files.save_denoiser(pipelines["flux"], tmp_path / "model.safetensors")
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


@pytest.mark.parametrize(
    ("pipeline", "ups", "known"),
    [
        ("StableDiffusionPipeline", {1, 2, 3}, "output_blocks.11.0.skip_connection.weight"),
        (
            "StableDiffusionXLPipeline",
            {0, 1},
            "input_blocks.8.1.transformer_blocks.9.attn2.to_k.weight",
        ),
    ],
)
def test_names_of_the_published_unets(
    pipeline: str,
    ups: set[int],
    known: str,
    pipelines: Mapping[str, Path],
    single_files: Mapping[str, Path],
) -> None:
    """A file of the published size needs no config: its names and shapes are those of the table."""
    config = dict(ORIGINAL_MODELS[pipeline]["unet"][2])
    with torch.device("meta"):
        own = library("diffusers").UNet2DConditionModel.from_config(config).state_dict()
    arrays = {
        f"model.diffusion_model.{original_files.unet_name(name, ups, 2)}": WeightArray(
            "float16", tuple(tensor.shape), np.zeros(0).copy
        )
        for name, tensor in own.items()
    }
    assert f"model.diffusion_model.{known}" in arrays
    name = "sdxl" if "XL" in pipeline else "sd15"
    converted = convert_denoiser(
        open_pipeline(single_files[name], pipelines[name] / "tokenizer"), arrays
    )
    assert {name: array.shape for name, array in converted.items()} == {
        name: tuple(tensor.shape) for name, tensor in own.items()
    }


def export_denoiser(
    opened: OpenedPipeline, tensors: Mapping[str, torch.Tensor], home: Path, largest: int = 5 << 30
) -> None:
    """Write a whole pipeline as `samecurve export --format diffusers` does."""
    write_surroundings(opened, home)
    written = ExportedFile(f"{opened.kind.component}/{DENOISER_FILE}", tensors, "")
    write_weights(home, written, dtype="float32", largest=largest, more={})


@pytest.mark.parametrize("name", tiny_pipelines.ALL)
def test_an_export_makes_the_same_pictures(
    name: str, pipelines: Mapping[str, Path], tmp_path: Path
) -> None:
    opened = open_pipeline(pipelines[name])
    denoiser = build_denoiser(opened)
    export_denoiser(opened, denoiser.state_dict(), tmp_path, largest=100_000)
    assert len(list((tmp_path / opened.kind.component).glob("*.safetensors"))) > 1
    again = own_pipeline(open_pipeline(tmp_path))
    read = getattr(again, opened.kind.component).state_dict()
    for key, value in denoiser.state_dict().items():
        assert torch.equal(read[key], value.double())
    for component in ("vae", *opened.encoders):
        (file,) = (pipelines[name] / component).glob("*.safetensors")
        assert (tmp_path / component / file.name).read_bytes() == file.read_bytes()


def test_weights_in_16_bits_and_in_several_files(
    pipelines: Mapping[str, Path], tmp_path: Path
) -> None:
    """A variant is read where there is nothing else, and exported under the plain name."""
    home = tmp_path / "pipeline"
    pipeline = library("diffusers").DiffusionPipeline.from_pretrained(
        pipelines["sdxl"], local_files_only=True, add_watermarker=False
    )
    pipeline.to(torch.float16).save_pretrained(home, variant="fp16", max_shard_size="20KB")
    opened = open_pipeline(home)
    assert opened.denoiser.weights is not None
    assert opened.denoiser.weights.name == "diffusion_pytorch_model.safetensors.index.fp16.json"
    arrays, _ = read_weights(opened.denoiser_place)
    own = pipeline.unet.state_dict()
    assert arrays.keys() == own.keys()
    assert all(np.array_equal(arrays[name].read(), own[name].float()) for name in own)
    read = load_model(opened, "text_encoder_2", torch.float32).state_dict()
    for name, value in pipeline.text_encoder_2.state_dict().items():
        assert torch.equal(read[name], value.float())
    export_denoiser(opened, own, tmp_path / "exported")
    assert not list((tmp_path / "exported").rglob("*fp16*.index.json"))
    again = own_pipeline(open_pipeline(tmp_path / "exported"))
    assert torch.equal(
        again.vae.decoder.conv_in.weight, pipeline.vae.decoder.conv_in.weight.double()
    )


def test_a_base_of_a_tokenizer_alone(
    single_files: Mapping[str, Path], pipelines: Mapping[str, Path], tmp_path: Path
) -> None:
    """Such a base is enough for the published sizes; another size is then refused."""
    made = pipelines["sdxl"] / "made"
    assert {file.name for file in made.iterdir()} == {"vocab.json", "merges.txt"}
    opened, whole = open_pipeline(single_files["sdxl"], made), open_pipeline(pipelines["sdxl"])
    for name in ("tokenizer", "tokenizer_2"):
        one, other = (
            Parts(each)[name]("a red cat", padding="max_length") for each in (opened, whole)
        )
        assert one["input_ids"] == other["input_ids"]
    with pytest.raises(UserError, match="the files of vae lack"):
        Parts(opened)["vae"]
    with pytest.raises(UserError, match="the files of text_encoder_2 "):
        Parts(opened)["text_encoder_2"]
    with pytest.raises(UserError, match=r"neither model_index\.json nor a tokenizer"):
        open_pipeline(single_files["sdxl"], tmp_path)


def test_a_file_may_say_that_it_predicts_v(pipelines: Mapping[str, Path], tmp_path: Path) -> None:
    file = original_files.save_original(
        pipelines["sdxl"],
        tmp_path / "v.safetensors",
        attended_ups={0},
        extra={"v_pred": torch.zeros(0), "ztsnr": torch.zeros(0)},
    )
    opened = open_pipeline(file, pipelines["sdxl"])
    assert opened.prediction == "v"
    assert any("v_pred" in note for note in opened.notes)
    alphas = family_of(opened).schedule.alphas_cumprod
    assert alphas is not None
    assert alphas[-1] < 1e-6


def test_arrays_that_are_missing_are_no_random_values(
    pipelines: Mapping[str, Path], tmp_path: Path
) -> None:
    home = tmp_path / "pipeline"
    shutil.copytree(pipelines["sd15"], home)
    for component, file in (("vae", "diffusion_pytorch_model"), ("text_encoder", "model")):
        path = home / component / f"{file}.safetensors"
        tensors = load_file(path)
        lost = sorted(tensors)[0]
        save_file({k: v for k, v in tensors.items() if k != lost}, path, {"format": "pt"})
        with pytest.raises(UserError, match=f"lack .*{lost}"):
            Parts(open_pipeline(home))[component]
