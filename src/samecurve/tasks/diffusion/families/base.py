"""What a family of pipelines does: its parts, what it encodes, and how its denoiser is called.

A family is found by the classes that a pipeline's directory names. It holds no state of a run.
Nothing here draws a random number: noise, time steps and dropped captions come from the caller.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

# What stands for captions: arrays with one row a caption, by the family's own names.
Conditions = Mapping[str, Tensor]


class Family(Protocol):
    """One kind of pipeline."""

    name: str  # as users know it: SD 1.5, SDXL, Z-Image
    component: str  # the part that is trained: unet or transformer
    multiple: int  # sides of a picture must be multiples of it, in pixels

    def encode_captions(self, parts: Mapping[str, Any], captions: Sequence[str]) -> Conditions:
        """What the frozen text encoders make of captions: one row a caption, on their device.

        parts: the pipeline's components by name
        """
        ...

    def encode_pictures(self, parts: Mapping[str, Any], pixels: Tensor) -> Tensor:
        """Moments of the latents: mean and deviation, [n, 2, channels, height, width].

        They are scaled as the denoiser is trained on. A VAE without a deviation gives zeros.

        pixels: [n, 3, height, width], from -1 to 1
        """
        ...

    def decode_latents(self, parts: Mapping[str, Any], latents: Tensor) -> Tensor:
        """Pixels of scaled latents: [n, 3, height, width], from -1 to 1."""
        ...

    def predict(
        self, model: nn.Module, noisy: Tensor, time: Tensor, conditions: Mapping[str, Tensor]
    ) -> Tensor:
        """What the denoiser says of noisy latents, in their shape.

        time: [n]; of epsilon and v the scheduler's time step, as whole numbers; of flow from 0
            (a picture) to 1 (noise)
        conditions: of encode_captions(), and those of size_conditions()
        """
        ...

    def size_conditions(
        self, *, original: tuple[int, int], corner: tuple[int, int], size: tuple[int, int]
    ) -> Mapping[str, Sequence[float]]:
        """What the denoiser is told of a picture's size: numbers of one row, by name.

        original, size: height and width before and after scaling and cropping; corner: top and
        left of the crop. Empty where the family is told nothing.
        """
        ...
