"""A family does what the library's own pipeline does, and each row alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny_pipelines
import torch
from pipeline_copies import INDEX, SCHEDULER, changed, own_pipeline
from tiny_pipelines import CLIP_LENGTH
from torch import Tensor

from samecurve_products.pictures.diffusion.families.denoising import denoise, sample
from samecurve_products.pictures.diffusion.families.library import library
from samecurve_products.pictures.diffusion.families.loading import Parts, load_model
from samecurve_products.pictures.diffusion.families.opened import OpenedPipeline
from samecurve_products.pictures.diffusion.families.pipeline import family_of, open_pipeline

# diffusers' own schedulers, with newer numpy
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

CAPTIONS = ["a red cat, sitting", "", "two blue houses " * 20]


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


_LONG = {"sd15", "sd3", "flux2"}  # make test-long


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[pytest.mark.long] if name in _LONG else [])
        for name in tiny_pipelines.ALL
    ],
)
def ready(request: pytest.FixtureRequest, pipelines: Mapping[str, Path]) -> Ready:
    torch.manual_seed(1)
    return Ready(open_pipeline(pipelines[request.param]))


def test_an_outline_has_the_shapes_of_encoded_captions(ready: Ready) -> None:
    outline = ready.family.caption_outline()
    encoded = ready.family.encode_captions(ready.parts, [""])
    assert outline.keys() == encoded.keys()
    shapes = {name: shape for name, shape in outline.items() if isinstance(shape, tuple)}
    assert shapes == {name: tuple(encoded[name].shape) for name in shapes}


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


def own_latents(ready: Ready, noise: Tensor, steps: int, guidance: float, **options: Any) -> Tensor:
    """Scaled latents that the library's own pipeline makes of noise."""
    _, _, height, width = noise.shape
    factor = ready.opened.factor
    pipeline = own_pipeline(ready.opened)
    is_packed = ready.opened.kind.name == "FLUX.1"
    if is_packed:
        noise = pipeline._pack_latents(noise, *noise.shape)
    latents: Tensor = pipeline(
        prompt=CAPTIONS[0],
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
    if ready.opened.kind.name == "FLUX.2 klein":  # it gives them as its VAE has them
        bn = pipeline.vae.bn
        mean, variance = (values.view(1, -1, 1, 1) for values in (bn.running_mean, bn.running_var))
        deviation = torch.sqrt(variance + pipeline.vae.config.batch_norm_eps)
        latents = (pipeline._patchify_latents(latents) - mean) / deviation
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
    assert not torch.allclose(ours, noise, rtol=0.1, atol=0.1)


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


def test_no_caption_is_zeros_for_sdxl(pipelines: Mapping[str, Path]) -> None:
    opened = open_pipeline(pipelines["sdxl"])
    family, parts = family_of(opened), Parts(opened)
    nothing, something = (family.encode_negative(parts, text) for text in ("", "blurry"))
    assert not any(values.any() for values in nothing.values())
    assert all(values.any() for values in something.values())


def test_latents_without_a_deviation(pipelines: Mapping[str, Path]) -> None:
    """The deviation is zero where a VAE gives one value a place."""
    vae = library("diffusers").AutoencoderTiny(
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1),
    )
    family = family_of(open_pipeline(pipelines["sd15"]))
    moments = family.encode_pictures({"vae": vae}, torch.rand(1, 3, 32, 32))
    assert not moments[:, 1].any()
    assert moments[:, 0].any()


def test_captions_that_are_too_long_are_counted(ready: Ready) -> None:
    """What is counted as left out is what the encoders' answer does not depend on."""
    captions = ["a red cat", "a" * 600, "a" * 605]
    left_out = ready.family.left_out(ready.parts, captions)
    assert left_out[0] == 0
    assert left_out[2] - left_out[1] == 5
    if ready.opened.kind.pipeline.startswith("StableDiffusionXL"):
        assert left_out[1] == 600 + 2 - CLIP_LENGTH
    encoded = ready.family.encode_captions(ready.parts, captions)
    for values in encoded.values():
        torch.testing.assert_close(values[1], values[2], rtol=1e-12, atol=1e-12)


def test_a_drawing_scheduler_draws_from_the_noise(
    pipelines: Mapping[str, Path], tmp_path: Path
) -> None:
    """The same noise gives the same picture, also where each step adds new noise."""
    opened = changed(
        pipelines["sd15"],
        tmp_path / "pipeline",
        INDEX,
        scheduler=["diffusers", "EulerAncestralDiscreteScheduler"],
    )
    family, parts = family_of(opened), Parts(opened)
    denoiser = load_model(opened, "unet", torch.float32)
    conditions = family.encode_captions(parts, CAPTIONS[:1])
    noise = torch.randn(1, *family.latent_shape(32, 32))
    one, again, other = (
        denoise(family, denoiser, each, conditions=conditions, negative=None, steps=3)
        for each in (noise, noise, noise + 1e-3)
    )
    assert torch.equal(one, again)
    assert (one - other).abs().max() > 0.1


def test_old_schedulers_are_corrected_as_the_pipeline_does(
    pipelines: Mapping[str, Path], tmp_path: Path
) -> None:
    opened = changed(pipelines["sd15"], tmp_path / "pipeline", SCHEDULER, steps_offset=0)
    with pytest.warns(FutureWarning, match="steps_offset"):
        own = library("diffusers").StableDiffusionPipeline.from_pretrained(
            opened.place, local_files_only=True
        )
    assert own.scheduler.config.steps_offset == 1
    assert family_of(opened).scheduler().config.steps_offset == 1


@pytest.mark.parametrize("kind", ["exponential", "linear"])
def test_larger_pictures_are_shifted_more(
    kind: str, pipelines: Mapping[str, Path], tmp_path: Path
) -> None:
    """One factor does what the library's scheduler does to times."""
    home = tmp_path / "pipeline"
    opened = changed(pipelines["flux"], home, SCHEDULER, time_shift_type=kind, max_shift=1.3)
    family, times = family_of(opened), torch.linspace(0.1, 0.9, 5, dtype=torch.float64)
    scheduler, shifts = family.scheduler(), []
    for side in (64, 512):
        tokens = family.tokens(side, side)
        family.set_times(scheduler, 5, tokens)
        shift = family.schedule.shift(tokens)
        mu = 0.5 + (tokens - 256) * (1.3 - 0.5) / (4096 - 256)
        torch.testing.assert_close(
            scheduler.time_shift(mu, 1.0, times), shift * times / (1 + (shift - 1) * times)
        )
        shifts.append(shift)
    assert shifts[1] > shifts[0]
    constant = family_of(open_pipeline(pipelines["sd3"])).schedule
    assert constant.shift(1) == constant.shift(10_000) == 3.0


def test_sd3_without_t5(pipelines: Mapping[str, Path], tmp_path: Path) -> None:
    """Zeros stand for T5, as in the library's pipeline."""
    opened = changed(
        pipelines["sd3"],
        tmp_path / "pipeline",
        INDEX,
        text_encoder_3=[None, None],
        tokenizer_3=[None, None],
    )
    ready = Ready(opened)
    embeddings = ready.family.encode_captions(ready.parts, CAPTIONS[:1])["embeddings"]
    assert embeddings.shape == (1, CLIP_LENGTH + 256, 40)
    assert not embeddings[:, CLIP_LENGTH:].any()
    assert ready.family.left_out(ready.parts, ["a" * 80]) == [5]
    assert ready.opened.longest_side == 24 * 2 * 2


def test_a_distilled_model_is_not_guided(pipelines: Mapping[str, Path], tmp_path: Path) -> None:
    assert family_of(open_pipeline(pipelines["flux2"])).is_guided(4.0)
    distilled = changed(pipelines["flux2"], tmp_path / "pipeline", INDEX, is_distilled=True)
    assert not family_of(distilled).is_guided(4.0)
