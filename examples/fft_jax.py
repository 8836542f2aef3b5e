"""examples/fft.py in flax: waves told apart by a filter of frequencies, with complex weights."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from samecurve import Mean


class Waves:
    """Noisy waves of random phase, labelled by direction and frequency."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, ids):
        return {"picture": np.stack([self.picture(i) for i in ids]), "label": np.asarray(ids) % 4}

    def picture(self, i):
        random, (y, x) = np.random.default_rng(i), np.mgrid[:16, :16] * np.pi / 8
        wave = np.sin([2, 3][i % 2] * (x if i % 4 < 2 else y) + random.uniform(0, 2 * np.pi))
        return (wave + random.standard_normal((16, 16))).astype(np.float32)


class Block(nnx.Module):
    """A complex factor for each channel and frequency, then a mix of the channels."""

    def __init__(self, width, rngs):
        self.filter = nnx.Param(jax.random.normal(rngs(), (16, 9, width), jnp.complex64))
        self.mix = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x):
        filtered = jnp.fft.rfft2(x, axes=(1, 2)) * self.filter[...]
        return jax.nn.gelu(self.mix(jnp.fft.irfft2(filtered, axes=(1, 2))))


class Classifier(nnx.Module):
    def __init__(self, width, depth, rngs):
        self.lift, self.head = nnx.Linear(1, width, rngs=rngs), nnx.Linear(width, 4, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs) for _ in range(depth)])

    def __call__(self, picture):
        x = self.lift(picture[..., None])
        for block in self.blocks:
            x = x + block(x)
        return self.head(jnp.square(x).mean((1, 2)))  # power: a wave's mean is zero


class Spectral:
    def __init__(self, model, data):
        self.fields, self.data = model, data

    def model(self, rngs):
        return Classifier(**self.fields, rngs=rngs)

    def loss(self, model, batch):
        logs, labels = jax.nn.log_softmax(model(batch["picture"])), batch["label"]
        return Mean(-jnp.take_along_axis(logs, labels[:, None], axis=1).sum(), len(labels))

    def train_data(self):
        return Waves(self.data["samples"])
