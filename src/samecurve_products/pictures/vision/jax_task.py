"""The vision task with JAX."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from samecurve.core.protocols import Sample
from samecurve.seam import IGNORED, Arrays, Mean, rng
from samecurve_products.pictures.vision.filters import filter_pictures, is_of_a_filter
from samecurve_products.pictures.vision.flax_costs import sample_costs
from samecurve_products.pictures.vision.flax_layers import widened
from samecurve_products.pictures.vision.flax_model import Classifier
from samecurve_products.pictures.vision.layout import skip_rates
from samecurve_products.pictures.vision.task import TOP, VisionTask
from samecurve_products.pictures.vision.wrong_answers import TOGETHER, wrong_answers

_NARROW_DTYPES = (jnp.bfloat16, jnp.float16)


class JaxVision(VisionTask):
    def model(self, dtype: Any) -> Classifier:
        """The classifier. dtype: the type that products are computed in."""
        return Classifier(
            self.fields,
            self.grid,
            channels=self.format.shape[2],
            classes=self.num_classes,
            narrow=dtype if dtype in _NARROW_DTYPES else None,
        )

    def leave_out(self, rows: Arrays, real: jax.Array) -> Arrays:
        """The batch with labels removed from the rows that do not count (real is False)."""
        return {**rows, "labels": jnp.where(real, rows["labels"], IGNORED)}

    def loss(self, model: Any, batch: Arrays) -> Mean:
        kept, features = self._factors(batch)
        logits = widened(model(self._normalized(batch["pixels"]), kept, features))
        return self._mean(logits, batch)

    def metrics(self, model: Any, batch: Arrays) -> Mapping[str, Mean]:
        """Loss, near answers, and confusion: how many images have each [label, answer]."""
        logits = widened(model(self._normalized(batch["pixels"])))
        real, classes = batch["labels"] != IGNORED, logits.shape[-1]
        labels = jnp.where(real, batch["labels"], 0)
        counts = jnp.zeros(classes * classes, jnp.int32)
        counts = counts.at[labels * classes + logits.argmax(-1)].add(real.astype(jnp.int32))
        picked = jnp.take_along_axis(logits, labels[:, None], axis=-1)
        near = ((logits > picked).sum(-1) < TOP) & real
        return {
            "loss": self._mean(logits, {"labels": batch["labels"]}),
            "confusion": Mean(counts.reshape(classes, classes), 1),
            "top5": Mean(near.sum(), real.sum()),
        }

    def sample(self, model: nnx.Module, seed: int) -> Sequence[Sample]:
        """Held-out images that the model answers wrongly, and filters. seed: nothing is drawn"""
        del seed
        parameters = {
            ".".join(map(str, path)): leaf
            for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))
        }
        filters = {
            name: np.asarray(leaf[...]) for name, leaf in parameters.items() if is_of_a_filter(name)
        }

        def answer(rows: dict[str, NDArray[Any]]) -> NDArray[Any]:
            pixels, count = rows["pixels"], len(rows["pixels"])
            filled = np.resize(pixels, (TOGETHER, *pixels.shape[1:]))  # one compiled shape
            return np.asarray(self._chances(model, filled))[:count]

        wrong = wrong_answers(self.images.validation, answer, self.format.classes)
        return [*wrong, *filter_pictures(filters, self.grid)]

    @cached_property
    def _chances(self) -> Callable[..., jax.Array]:
        """A program that gives the chance of each class: (model, pixels) -> [rows, classes]."""

        @nnx.jit
        def chances(model: Any, pixels: jax.Array) -> jax.Array:
            return jax.nn.softmax(widened(model(self._normalized(pixels))))

        return chances

    def _mean(self, logits: jax.Array, batch: Arrays) -> Mean:
        """Cross-entropy; of a mixed image, with the share that each of its labels has."""
        real = batch["labels"] != IGNORED
        errors = self._errors(logits, jnp.where(real, batch["labels"], 0))
        if "mix" in batch:
            share = batch["mix"].astype(errors.dtype)
            errors = share * errors + (1 - share) * self._errors(logits, batch["labels_2"])
        return Mean(jnp.where(real, errors, 0).sum(), real.sum())

    def _errors(self, logits: jax.Array, labels: jax.Array) -> jax.Array:
        """Cross-entropy of each row, with label smoothing."""
        shares, smoothing = jax.nn.log_softmax(logits), self.fields.label_smoothing
        picked = jnp.take_along_axis(shares, labels[:, None], axis=-1)[:, 0]
        return -(1 - smoothing) * picked - smoothing * shares.mean(-1)

    def _factors(self, batch: Arrays) -> tuple[jax.Array | None, jax.Array | None]:
        """What dropout and stochastic depth multiply with, by numbers that follow the sample."""
        fields, kept, features = self.fields, None, None
        if fields.drop_path:
            rates = jnp.asarray(skip_rates(fields), jnp.float32)
            kept = (rng(batch).uniform(fields.depth) >= rates).astype(jnp.float32) / (1 - rates)
        if fields.dropout:
            drawn = rng(batch).uniform(fields.width) >= fields.dropout
            features = drawn.astype(jnp.float32) / (1 - fields.dropout)
        return kept, features

    def _normalized(self, pixels: jax.Array) -> jax.Array:
        """Pixels with mean and deviation taken out, in the type of the run's numbers."""
        is_bytes = pixels.dtype == jnp.uint8
        values = pixels.astype(jnp.zeros(0).dtype) / 255 if is_bytes else pixels
        mean, std = (jnp.asarray(of, values.dtype) for of in (self.format.mean, self.format.std))
        return (values - mean) / std

    def facts(self) -> Mapping[str, Any]:
        costs = sample_costs(lambda: self.model(jnp.float32), self.format.sample_shape)
        return {**costs, **self.about_images()}
