"""Models of pixels with random weights: a UNet or a transformer of diffusers, which reads words.

Both are called as model(pixels, time, words), and give an array in the shape of `pixels`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samecurve.seam import UserError, install_command
from samecurve_products.pictures.diffusion.sections import DiffusionModel
from samecurve_products.pictures.diffusion.words import PADDING, Words

COLOURS = 3
TIME_SCALE = 1000.0  # the models' sine waves are made for times from 0 to 1000


class WordEmbedding(nn.Module):
    """Words as vectors that a layer can attend to, each with its place in the caption."""

    def __init__(self, words: Words, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(len(words), width)
        self.places = nn.Embedding(words.length, width)

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors [rows, length, width], and a mask of the words that are no padding."""
        places = torch.arange(words.shape[1], device=words.device)
        vectors = self.words(words) + self.places(places)
        return vectors, (words != PADDING).to(vectors.dtype)


class PixelUNet(nn.Module):
    """A UNet over squares of pixels: `patch` x `patch` pixels are the channels of one place."""

    def __init__(self, fields: DiffusionModel, words: Words) -> None:
        super().__init__()
        from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

        levels = len(fields.widths)
        channels = COLOURS * fields.patch**2
        plain = min(1, levels - 1)  # the first of several levels has no attention
        rest = levels - plain
        self.patch = fields.patch
        self.text = WordEmbedding(words, fields.text_width)
        self.net = UNet2DConditionModel(
            in_channels=channels,
            out_channels=channels,
            block_out_channels=tuple(fields.widths),
            layers_per_block=1,
            down_block_types=("DownBlock2D",) * plain
            + ("CrossAttnDownBlock2D",) * (levels - plain),
            up_block_types=(*["CrossAttnUpBlock2D"] * rest, *["UpBlock2D"] * plain),
            cross_attention_dim=fields.text_width,
            attention_head_dim=tuple(width // fields.head_width for width in fields.widths),
            norm_num_groups=_groups(fields.widths),
        )

    def forward(self, pixels: Tensor, time: Tensor, words: Tensor) -> Tensor:
        vectors, mask = self.text(words)
        places = F.pixel_unshuffle(pixels, self.patch)
        out = self.net(
            places,
            time * TIME_SCALE,
            encoder_hidden_states=vectors,
            encoder_attention_mask=mask,
            return_dict=False,
        )[0]
        return F.pixel_shuffle(out, self.patch)


class PixelTransformer(nn.Module):
    """A diffusion transformer over squares of `patch` x `patch` pixels."""

    def __init__(self, fields: DiffusionModel, words: Words, sample_size: int) -> None:
        super().__init__()
        from diffusers.models.transformers.pixart_transformer_2d import PixArtTransformer2DModel

        self.text = WordEmbedding(words, fields.text_width)
        self.net = PixArtTransformer2DModel(
            num_attention_heads=fields.width // fields.head_width,
            attention_head_dim=fields.head_width,
            in_channels=COLOURS,
            out_channels=COLOURS,
            num_layers=fields.depth,
            norm_num_groups=1,
            cross_attention_dim=fields.width,
            sample_size=sample_size,
            patch_size=fields.patch,
            caption_channels=fields.text_width,
            use_additional_conditions=False,
        )

    def forward(self, pixels: Tensor, time: Tensor, words: Tensor) -> Tensor:
        vectors, mask = self.text(words)
        out: Tensor = self.net(
            pixels,
            vectors,
            time * TIME_SCALE,
            encoder_attention_mask=mask,
            return_dict=False,
        )[0]
        return out


def build_model(fields: DiffusionModel, words: Words, resolution: int) -> nn.Module:
    """The new model that the fields describe. UserError: diffusers is not installed."""
    check_widths(fields)
    try:
        if fields.architecture == "unet":
            return PixelUNet(fields, words)
        return PixelTransformer(fields, words, resolution)
    except ImportError as error:
        raise UserError(
            f"task diffusion needs diffusers: {error}", install_command("diffusion"), "task"
        ) from None


def check_widths(fields: DiffusionModel) -> None:
    """UserError: a width can't be cut into heads."""
    name = "widths" if fields.architecture == "unet" else "width"
    widths = fields.widths[-1:] if len(fields.widths) == 1 else fields.widths[1:]
    for width in widths if name == "widths" else [fields.width]:
        if width % fields.head_width:
            raise UserError(
                f"model.{name} {width} is not a multiple of model.head_width {fields.head_width}",
                f"{width - width % fields.head_width or fields.head_width}, or another head_width",
                f"model.{name}",
            )


def side_multiple(fields: DiffusionModel) -> int:
    """The sides of a new model's pictures are multiples of it, in pixels."""
    levels = len(fields.widths) if fields.architecture == "unet" else 1
    return int(fields.patch * 2 ** (levels - 1))


def _groups(widths: list[int]) -> int:
    """Groups of a GroupNorm that every width can be cut into, of four channels or more each."""
    fitting = [n for n in range(1, 33) if all(width % n == 0 for width in widths)]
    wide = [n for n in fitting if min(widths) // n >= 4]
    return max(wide or fitting[:1])
