"""Classifiers of images with PyTorch: [rows, height, width, channels] -> [rows, classes].

Clips are [rows, frames, height, width, channels]: a frame is what a recurrence sees in a step.

Names, layouts and arithmetic are those of flax_model.py. No operation has a fixed number format, so
a float64 model computes in float64 throughout; spectra are never narrower than float32.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samecurve_products.pictures.vision.layout import NORM_AXES, RHO, Grid
from samecurve_products.pictures.vision.sections import VisionModel

_EPS = 1e-6


class Classifier(nn.Module):
    """Patches, blocks, the patches of the last step pooled, and a linear layer.

    channels: of an image. grid: its patches
    """

    def __init__(self, fields: VisionModel, grid: Grid, *, channels: int, classes: int) -> None:
        super().__init__()
        self.fields, self.grid = fields, grid
        has_conv, entering = fields.stem == "conv", fields.stem_width(channels)
        self.conv = Conv(channels, entering) if has_conv else None
        self.stem = nn.Linear(entering * fields.patch**2, fields.width)
        self.position = None
        if fields.arch == "vit":
            self.position = nn.Embedding(grid.patches, fields.width)
        self.frame_position = None
        frames = fields.num_steps if fields.arch == "vit" and fields.cssm == "attention" else 1
        if frames > 1:
            self.frame_position = nn.Embedding(frames, fields.width)
        self.blocks = nn.ModuleList(Block(fields, grid) for _ in range(fields.depth))
        self.norm = _norm(fields)
        self.head = nn.Linear(fields.width, classes)

    def forward(
        self, images: Tensor, kept: Tensor | None = None, features: Tensor | None = None
    ) -> Tensor:
        """The logits.

        images: normalised. kept: [rows, blocks], what a block's addition is multiplied with
        features: [rows, width], what the features before the last layer are multiplied with
        """
        x = images.to(self.head.weight.dtype)
        if self.conv is not None:
            x = F.gelu(self.conv(x))
        x = self.stem(self._patches(x))
        if self.position is not None:
            places = torch.arange(self.grid.patches, device=x.device)
            x = x + self.position(places).view(self.grid.height, self.grid.width, -1)
        if images.ndim == 4:
            x = x[:, None].expand(-1, self.fields.num_steps, -1, -1, -1)
        if self.frame_position is not None:
            places = torch.arange(self.fields.num_steps, device=x.device)
            x = x + self.frame_position(places)[:, None, None]
        for number, block in enumerate(self.blocks):
            x = block(x, None if kept is None else kept[:, number])
        last = self.norm(x[:, -1])
        pooled = last.mean((1, 2))
        if self.fields.pool == "max":  # of equal ones the first has the gradient, as in flax_model
            pooled = last.flatten(1, 2).max(1).values
        if features is not None:
            pooled = pooled * features.to(pooled.dtype)
        return cast("Tensor", self.head(pooled))

    def _patches(self, images: Tensor) -> Tensor:
        """[..., height, width, channels] -> [..., patches down, patches across, numbers]."""
        *rows, _, _, channels = images.shape
        patch, grid = self.fields.patch, self.grid
        x = images.reshape(*rows, grid.height, patch, grid.width, patch, channels)
        return x.transpose(-4, -3).reshape(*rows, grid.height, grid.width, -1)


class Block(nn.Module):
    """A mixer over space, and with arch vit a feed-forward. x: [rows, steps, down, across, width].

    kept: [rows], what the additions are multiplied with; None: 1
    """

    def __init__(self, fields: VisionModel, grid: Grid) -> None:
        super().__init__()
        self.norm = _norm(fields)
        self.mixer = _MIXERS[fields.cssm](fields, grid)
        self.feeds = fields.arch == "vit"
        if self.feeds:
            self.feed_norm = _norm(fields)
            self.up = nn.Linear(fields.width, fields.inner)
            self.down = nn.Linear(fields.inner, fields.width)

    def forward(self, x: Tensor, kept: Tensor | None = None) -> Tensor:
        factor = None if kept is None else kept.view(-1, 1, 1, 1, 1)
        x = _add(x, self.mixer(self.norm(x)), factor)
        if self.feeds:
            x = _add(x, self.down(F.gelu(self.up(self.feed_norm(x)))), factor)
        return x


def _add(x: Tensor, change: Tensor, factor: Tensor | None) -> Tensor:
    return x + change if factor is None else x + change * factor.to(change.dtype)


class ImageNorm(nn.Module):
    """Layer normalisation of [..., down, across, width] over a whole image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        axes = NORM_AXES["image"]
        centred = x - x.mean(axes, keepdim=True)
        variance = (centred * centred).mean(axes, keepdim=True)
        return centred * torch.rsqrt(variance + _EPS) * self.weight + self.bias


def _norm(fields: VisionModel) -> nn.Module:
    if fields.norm == "image":
        return ImageNorm(fields.width)
    return nn.LayerNorm(fields.width, eps=_EPS)


class Attention(nn.Module):
    """Self-attention over the patches, of clips those of all frames."""

    def __init__(self, fields: VisionModel, _grid: Grid) -> None:
        super().__init__()
        self.heads = fields.heads
        self.query_key_value = nn.Linear(fields.width, 3 * fields.width)
        self.out = nn.Linear(fields.width, fields.width)

    def forward(self, x: Tensor) -> Tensor:
        rows, steps, height, width, _ = x.shape
        parts = self.query_key_value(x).chunk(3, -1)
        query, key, value = (
            part.reshape(rows, steps * height * width, self.heads, -1).transpose(1, 2)
            for part in parts
        )
        attended = F.scaled_dot_product_attention(query, key, value)
        return cast("Tensor", self.out(attended.transpose(1, 2).reshape(x.shape)))


class Gated(nn.Module):
    """The gated state space.

    (u, z) = input x; u = SiLU(conv u); h_t = exp(-delta) K h_{t-1} + delta gain U_t, in
    frequencies; y = out [irfft2(readout h_t) SiLU(z)]. delta, gain and readout are one number a
    frequency, and follow from the mean of u over space.
    """

    def __init__(self, fields: VisionModel, grid: Grid) -> None:
        super().__init__()
        width = fields.width
        self.grid = grid
        self.input = nn.Linear(width, 2 * width)
        self.conv = DepthwiseConv(width)
        self.kernel = None  # one step moves no state
        if fields.num_steps > 1:
            side = fields.kernel_size
            self.kernel = nn.Parameter(torch.zeros(width, side, side))
        self.delta = nn.Linear(width, grid.frequencies)
        self.gain = nn.Linear(width, grid.frequencies)
        self.readout = nn.Linear(width, grid.frequencies)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        u, z = self.input(x).chunk(2, -1)
        u = F.silu(self.conv(u))
        context = u.mean((2, 3))
        delta = self._by_frequency(self.delta(context))
        delta = torch.logaddexp(delta, torch.zeros_like(delta))
        gain = self._by_frequency(self.gain(context))
        readout = self._by_frequency(self.readout(context))
        entering = (delta * gain) * spectrum(u)
        y = inverse(readout * self._states((-delta).exp(), entering), self.grid)
        return cast("Tensor", self.out(y.to(z.dtype) * F.silu(z)))

    def _states(self, decay: Tensor, entering: Tensor) -> Tensor:
        """The states of all steps."""
        if self.kernel is None:
            return entering
        kernel = bounded(self.kernel, self.grid)
        states = [entering[:, 0]]
        for step in range(1, entering.shape[1]):
            states.append(decay[:, step] * kernel * states[-1] + entering[:, step])
        return torch.stack(states, 1)

    def _by_frequency(self, gates: Tensor) -> Tensor:
        """[rows, steps, frequencies] -> even gates [rows, steps, 1, down, across]."""
        shape = (*gates.shape[:2], 1, self.grid.height, self.grid.width // 2 + 1)
        return even(widened(gates).reshape(shape), self.grid)


class NoMixing(nn.Module):
    """The gated block without all that mixes over space: no convolution, no kernel, no gates that
    follow from a mean over space.
    """

    def __init__(self, fields: VisionModel, _grid: Grid) -> None:
        super().__init__()
        self.input = nn.Linear(fields.width, 2 * fields.width)
        self.out = nn.Linear(fields.width, fields.width)

    def forward(self, x: Tensor) -> Tensor:
        u, z = self.input(x).chunk(2, -1)
        return cast("Tensor", self.out(F.silu(u) * F.silu(z)))


class Conv(nn.Module):
    """A 3 x 3 convolution [..., down, across, in] -> [..., down, across, out]; zeros beyond the
    edges. Its filter is [out, in, 3, 3].
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.zeros(outputs, inputs, 3, 3))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        planes = x.reshape(-1, *x.shape[-3:]).permute(0, 3, 1, 2)
        y = F.conv2d(planes, self.filter, self.bias, padding=1).permute(0, 2, 3, 1)
        return y.reshape(*x.shape[:-1], -1)


class DepthwiseConv(nn.Module):
    """A 3 x 3 convolution of each channel by itself; zeros beyond the edges."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.zeros(channels, 3, 3))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        channels = x.shape[-1]
        planes = x.flatten(0, 1).permute(0, 3, 1, 2)
        y = F.conv2d(planes, self.filter[:, None], self.bias, padding=1, groups=channels)
        return y.permute(0, 2, 3, 1).view(x.shape)


def widened(x: Tensor) -> Tensor:
    """x as float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def spectrum(x: Tensor) -> Tensor:
    """[..., down, across, channels] -> frequencies [..., channels, down, across / 2 + 1]."""
    return cast("Tensor", torch.fft.rfft2(widened(x).movedim(-1, -3)))


def inverse(frequencies: Tensor, grid: Grid) -> Tensor:
    """Frequencies [..., channels, down, across / 2 + 1] -> [..., down, across, channels]."""
    images = torch.fft.irfft2(frequencies, s=(grid.height, grid.width))
    return cast("Tensor", images.movedim(-3, -1))


def bounded(kernel: Tensor, grid: Grid) -> Tensor:
    """rho K / (1 + |K|) of the kernel's frequencies K; the kernel's middle is at the origin."""
    down, across = grid.height - kernel.shape[-2], grid.width - kernel.shape[-1]
    padded = F.pad(widened(kernel), (0, across, 0, down))
    middle = (-(kernel.shape[-2] // 2), -(kernel.shape[-1] // 2))
    frequencies = torch.fft.rfft2(padded.roll(middle, dims=(-2, -1)))
    return cast("Tensor", RHO * frequencies / (1 + frequencies.abs()))


def even(gates: Tensor, grid: Grid) -> Tensor:
    """Gates that are equal at a frequency and at its negative: those of a real convolution.

    rfft2 holds both only in its first column, and, of an even width, in its last one.
    """
    down = (-torch.arange(grid.height, device=gates.device)) % grid.height
    columns = torch.arange(gates.shape[-1], device=gates.device)
    both = (columns == 0) | (2 * columns == grid.width)
    return torch.where(both, (gates + gates.index_select(-2, down)) / 2, gates)


_MIXERS = {"attention": Attention, "gated": Gated, "no_fft": NoMixing}  # layout of TORCH_BLOCKS
