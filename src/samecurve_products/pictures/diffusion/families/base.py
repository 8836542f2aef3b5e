"""What a family of pipelines does: its parts, what it encodes, and how its denoiser is called.

A family is made of an opened pipeline, and holds no state of a run. Nothing here draws a random
number: noise, time steps and dropped captions come from the caller.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from samecurve_products.pictures.diffusion.families.autoencoder import decode, encode
from samecurve_products.pictures.diffusion.families.loading import OutlineParts, load_scheduler
from samecurve_products.pictures.diffusion.families.opened import OpenedPipeline
from samecurve_products.pictures.diffusion.families.schedule import Schedule, read_schedule
from samecurve_products.pictures.diffusion.families.text_side import count_tokens

# What stands for captions: arrays with one row a caption, by the family's own names.
Conditions = Mapping[str, Tensor]


class Family(ABC):
    """One kind of pipeline. What most kinds have in common is done here.

    guidance: how strongly the pipeline's own pictures follow a prompt
    longest_caption: the tokens of a caption that are read; None: as the tokenizer says
    """

    guidance: ClassVar[float]
    longest_caption: ClassVar[int | None] = None

    def __init__(self, opened: OpenedPipeline) -> None:
        self.opened = opened

    @abstractmethod
    def encode_captions(self, parts: Mapping[str, Any], captions: Sequence[str]) -> Conditions:
        """What the frozen text encoders make of captions: one row a caption, on their device.

        parts: the pipeline's components by name
        """

    @abstractmethod
    def predict(
        self, model: nn.Module, noisy: Tensor, time: Tensor, conditions: Mapping[str, Tensor]
    ) -> Tensor:
        """What the denoiser says of noisy latents, in their shape.

        noisy: in the number format in which the denoiser computes
        time: [n]; of epsilon and v the scheduler's time step; of flow from 0 (a picture) to 1
            (noise), and the answer is then noise - picture
        conditions: of encode_captions(), through with_guidance(), and those of size_conditions()
        """

    def caption_outline(self) -> Mapping[str, Any]:
        """What stands for one caption, without values: the shape of each array, or a value.

        The cost of a call of the denoiser is counted with it.
        """
        with torch.device("meta"):
            encoded = self.encode_captions(OutlineParts(self.opened), [""])
        return {name: tuple(array.shape) for name, array in encoded.items()}

    def encode_negative(self, parts: Mapping[str, Any], caption: str) -> Conditions:
        """What a picture is led away from: one row. '' is what the pipeline itself takes."""
        return self.encode_captions(parts, [caption])

    def left_out(self, parts: Mapping[str, Any], captions: Sequence[str]) -> list[int]:
        """The tokens of each caption that no text encoder reads, since it is too long."""
        tokenizer = parts[self.opened.kind.encoders[self.opened.encoders[-1]]]
        longest = min(
            self.longest_caption or tokenizer.model_max_length, tokenizer.model_max_length
        )
        texts = [self.chat(tokenizer, caption) for caption in captions]
        return [max(0, count - longest) for count in count_tokens(tokenizer, texts)]

    def chat(self, tokenizer: Any, caption: str) -> str:
        """A caption as the text encoder sees it: in a language model's template, if it is one."""
        del tokenizer
        return caption

    def encode_pictures(self, parts: Mapping[str, Any], pixels: Tensor) -> Tensor:
        """Moments of the latents: mean and deviation, [n, 2, channels, height, width].

        They are scaled as the denoiser is trained on. A VAE without a deviation gives zeros.

        pixels: [n, 3, height, width], from -1 to 1
        """
        return encode(parts["vae"], pixels)

    def decode_latents(self, parts: Mapping[str, Any], latents: Tensor) -> Tensor:
        """Pixels of scaled latents: [n, 3, height, width], about from -1 to 1."""
        return decode(parts["vae"], latents)

    def size_conditions(
        self, *, original: tuple[int, int], corner: tuple[int, int], size: tuple[int, int]
    ) -> dict[str, tuple[float, ...]]:
        """What the denoiser is told of a picture's size: numbers of one row, by name.

        original, size: height and width before and after scaling and cropping; corner: top and
        left of the crop. Empty where the family is told nothing.
        """
        del original, corner, size
        return {}

    def latent_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """Channels, height and width of the latents of a picture."""
        factor = self.opened.factor
        return self.opened.latent_channels, height // factor, width // factor

    def tokens(self, height: int, width: int) -> int:
        """The denoiser's tokens of a picture: shifts of time may follow it."""
        return (height // self.opened.multiple) * (width // self.opened.multiple)

    @cached_property
    def schedule(self) -> Schedule:
        """How much noise the denoiser was trained with. UserError: its scheduler says nothing."""
        return read_schedule(self.opened, self.scheduler())

    def scheduler(self) -> Any:
        """The library's scheduler of this pipeline, before the first step of a picture."""
        return load_scheduler(self.opened)

    def is_guided(self, guidance: float) -> bool:
        """Whether pictures of this guidance need the denoiser's answer to a negative, too."""
        return guidance > 1

    def guided(self, answer: Tensor, negative: Tensor, guidance: float) -> Tensor:
        """The denoiser's answer, led away from its answer to the negative."""
        return negative + guidance * (answer - negative)

    def with_guidance(self, conditions: Conditions, guidance: float) -> Conditions:
        """Conditions with the guidance, where the denoiser takes it as an input."""
        del guidance
        return conditions

    def set_times(self, scheduler: Any, steps: int, tokens: int) -> None:
        """Set the times of a picture's steps, as the pipeline itself does.

        tokens: of the picture
        """
        del tokens
        scheduler.set_timesteps(steps)
