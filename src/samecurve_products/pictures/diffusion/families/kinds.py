"""The pipelines that can be trained: the library's classes, their parts, and our families.

Nothing here imports an engine or the library.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of pipeline.

    pipeline, denoiser, vae: classes of the library
    encoders: text encoder -> its tokenizer, by the pipeline's names of its components
    optional: text encoders that a pipeline may lack
    family: module and class of ours, without the package
    patch: the places of the latents, across and down, that become one token; None: as the
        denoiser's config says, or 1
    packed: the places, across and down, that are laid into channels of the latents themselves
    """

    name: str  # as users know it
    pipeline: str
    component: str  # the part that is trained
    denoiser: str
    vae: str = "AutoencoderKL"
    encoders: Mapping[str, str]
    optional: frozenset[str] = frozenset()
    family: tuple[str, str]
    patch: int | None = None
    packed: int = 1

    @property
    def is_flow(self) -> bool:
        """Whether the denoiser learns a flow; else it learns the noise, or v."""
        return self.component == "transformer"

    def components(self, present: Collection[str]) -> tuple[str, ...]:
        """The components that are read of a pipeline. present: those that it has."""
        encoders = [name for name in self.encoders if name in present or name not in self.optional]
        tokenizers = [self.encoders[name] for name in encoders]
        return (self.component, "vae", "scheduler", *encoders, *tokenizers)


_TWO_TEXTS = {"text_encoder": "tokenizer", "text_encoder_2": "tokenizer_2"}

KINDS = (
    Kind(
        name="SDXL",
        pipeline="StableDiffusionXLPipeline",
        component="unet",
        denoiser="UNet2DConditionModel",
        encoders=_TWO_TEXTS,
        family=("stable_diffusion", "Sdxl"),
    ),
    Kind(
        name="Stable Diffusion 1 and 2",
        pipeline="StableDiffusionPipeline",
        component="unet",
        denoiser="UNet2DConditionModel",
        encoders={"text_encoder": "tokenizer"},
        family=("stable_diffusion", "StableDiffusion"),
    ),
    Kind(
        name="Z-Image",
        pipeline="ZImagePipeline",
        component="transformer",
        denoiser="ZImageTransformer2DModel",
        encoders={"text_encoder": "tokenizer"},
        family=("z_image", "ZImage"),
        patch=2,
    ),
    Kind(
        name="Stable Diffusion 3",
        pipeline="StableDiffusion3Pipeline",
        component="transformer",
        denoiser="SD3Transformer2DModel",
        encoders={**_TWO_TEXTS, "text_encoder_3": "tokenizer_3"},
        optional=frozenset({"text_encoder_3"}),
        family=("sd3", "StableDiffusion3"),
    ),
    Kind(
        name="FLUX.1",
        pipeline="FluxPipeline",
        component="transformer",
        denoiser="FluxTransformer2DModel",
        encoders=_TWO_TEXTS,
        family=("flux", "Flux"),
        patch=2,
    ),
    Kind(
        name="FLUX.2 klein",
        pipeline="Flux2KleinPipeline",
        component="transformer",
        denoiser="Flux2Transformer2DModel",
        vae="AutoencoderKLFlux2",
        encoders={"text_encoder": "tokenizer"},
        family=("flux2", "Flux2Klein"),
        packed=2,
    ),
)

SERVED = ", ".join(f"{kind.pipeline} ({kind.name})" for kind in KINDS)


def kind_of(pipeline: str) -> Kind | None:
    """The kind of a pipeline's class; None: it can't be trained here."""
    return next((kind for kind in KINDS if kind.pipeline == pipeline), None)
