"""Classifiers of images in flax: [rows, height, width, channels] -> [rows, classes].

Clips are [rows, frames, height, width, channels]: a frame is what a recurrence sees in a step.

Names, layouts and arithmetic are those of torch_model.py, as far as PyTorch has the blocks.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from samecurve_products.pictures.vision.flax_layers import Conv, Linear, Norm, Positions
from samecurve_products.pictures.vision.flax_mixers import MIXERS
from samecurve_products.pictures.vision.layout import Grid
from samecurve_products.pictures.vision.sections import VisionModel


class Classifier(nnx.Module):
    """Patches, blocks, the patches of the last step pooled, and a linear layer.

    channels: of an image. grid: its patches
    narrow: the type that products are computed in; None: the parameters' type
    """

    def __init__(
        self, fields: VisionModel, grid: Grid, *, channels: int, classes: int, narrow: Any = None
    ) -> None:
        self.fields, self.grid = fields, grid
        has_conv, entering = fields.stem == "conv", fields.stem_width(channels)
        self.conv = Conv(channels, entering, narrow) if has_conv else None
        self.stem = Linear(entering * fields.patch**2, fields.width, narrow)
        self.position = Positions(grid.patches, fields.width) if fields.arch == "vit" else None
        frames = fields.num_steps if fields.arch == "vit" and fields.cssm == "attention" else 1
        self.frame_position = Positions(frames, fields.width) if frames > 1 else None
        self.blocks = nnx.List([Block(fields, grid, narrow) for _ in range(fields.depth)])
        self.norm = Norm(fields.width, fields.norm)
        self.head = Linear(fields.width, classes, narrow)

    def __call__(
        self, images: jax.Array, kept: jax.Array | None = None, features: jax.Array | None = None
    ) -> jax.Array:
        """The logits.

        images: normalised. kept: [rows, blocks], what a block's addition is multiplied with
        features: [rows, width], what the features before the last layer are multiplied with
        """
        grid, dtype = self.grid, self.head.weight[...].dtype
        x = images.astype(dtype)
        if self.conv is not None:
            x = jax.nn.gelu(self.conv(x), approximate=False)
        x = self.stem(self._patches(x)).astype(dtype)
        if self.position is not None:
            x = x + self.position.weight[...].reshape(grid.height, grid.width, -1)
        if images.ndim == 4:
            x = jnp.broadcast_to(x[:, None], (x.shape[0], self.fields.num_steps, *x.shape[1:]))
        if self.frame_position is not None:
            x = x + self.frame_position.weight[...][:, None, None]
        for number, block in enumerate(self.blocks):
            x = block(x, None if kept is None else kept[:, number])
        last = self.norm(x[:, -1])
        pooled = _largest(last) if self.fields.pool == "max" else last.mean((1, 2))
        return self.head(pooled if features is None else pooled * features.astype(dtype))

    def _patches(self, images: jax.Array) -> jax.Array:
        """[..., height, width, channels] -> [..., patches down, patches across, numbers]."""
        *rows, _, _, channels = images.shape
        patch, grid = self.fields.patch, self.grid
        x = images.reshape(*rows, grid.height, patch, grid.width, patch, channels)
        return jnp.swapaxes(x, -4, -3).reshape(*rows, grid.height, grid.width, -1)


class Block(nnx.Module):
    """A mixer over space, and with arch vit a feed-forward. x: [rows, steps, down, across, width].

    kept: [rows], what the additions are multiplied with; None: 1
    """

    def __init__(self, fields: VisionModel, grid: Grid, narrow: Any) -> None:
        self.norm = Norm(fields.width, fields.norm)
        self.mixer = MIXERS[fields.cssm](fields, grid, narrow)
        self.feeds = fields.arch == "vit"
        if self.feeds:
            self.feed_norm = Norm(fields.width, fields.norm)
            self.up = Linear(fields.width, fields.inner, narrow)
            self.down = Linear(fields.inner, fields.width, narrow)

    def __call__(self, x: jax.Array, kept: jax.Array | None = None) -> jax.Array:
        factor = None if kept is None else kept.reshape(-1, 1, 1, 1, 1)
        x = _add(x, self.mixer(self.norm(x)), factor)
        if self.feeds:
            changed = jax.nn.gelu(self.up(self.feed_norm(x)), approximate=False)
            x = _add(x, self.down(changed), factor)
        return x


def _largest(x: jax.Array) -> jax.Array:
    """The largest number of each channel: [rows, down, across, width] -> [rows, width].

    By its place: the gradient of jnp.max divides by the number of places that equal the maximum,
    which is 0 where XLA computes a place anew within a fusion, with another rounding.
    """
    patches = x.reshape(x.shape[0], -1, x.shape[-1])
    places = jnp.argmax(jax.lax.stop_gradient(patches), 1, keepdims=True)
    return jnp.take_along_axis(patches, places, 1)[:, 0]


def _add(x: jax.Array, change: jax.Array, factor: jax.Array | None) -> jax.Array:
    """x and the change, in x's type."""
    return x + (change if factor is None else change * factor.astype(change.dtype)).astype(x.dtype)
