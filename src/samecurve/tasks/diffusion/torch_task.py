"""The diffusion task with PyTorch: loss, validation and pictures, under every strategy."""

from collections.abc import Mapping
from functools import cached_property
from importlib.metadata import version
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from samecurve.core.determinism.mean import Mean
from samecurve.core.protocols import WHOLE, Arrays, Part, Source
from samecurve.core.sample_numbers import rng
from samecurve.tasks.diffusion.objective import EVAL_TIMES, row_losses
from samecurve.tasks.diffusion.pixels import PixelTraining
from samecurve.tasks.diffusion.sampling import as_picture, first_noise
from samecurve.tasks.diffusion.task import DiffusionTask
from samecurve.tasks.forward_costs import forward_costs

_LIBRARY_BYTES = 90 << 20  # memory of diffusers in a process


class TorchDiffusion(DiffusionTask):
    """Pictures from noise. What is trained is PixelTraining's."""

    metric_names = ("loss",)

    @cached_property
    def _training(self) -> PixelTraining:
        return PixelTraining(self)

    def model(self) -> nn.Module:
        return self._training.model()

    def train_data(self) -> Source:
        return self._training.rows(self.pictures.train, augmented=True)

    def eval_data(self) -> Source | None:
        held_out = self.pictures.held_out
        return None if held_out is None else self._training.rows(held_out, augmented=False)

    def loss(self, model: Any, batch: Arrays) -> Mean:
        return self._mean(model, batch, times=1)

    def metrics(self, model: Any, batch: Arrays) -> Mapping[str, Mean]:
        """The loss with the same noise at the same times of each picture, whenever it is asked."""
        return {"loss": self._mean(model, batch, times=EVAL_TIMES)}

    def _mean(self, model: Any, batch: Arrays, *, times: int) -> Mean:
        training, numbers, weight = self._training, rng(batch), batch["weight"]
        losses = row_losses(
            training.objective,
            training.predict(model, batch),
            training.pictures(batch, numbers),
            numbers,
            times=times,
            mask=training.mask(batch),
        )
        return Mean((losses * weight).sum(), weight.sum())

    def sample(
        self,
        model: Any,
        seed: int,
        part: Part = WHOLE,
        step: int = 0,
        prompt: str | None = None,
    ) -> list[NDArray[np.uint8]]:
        """A picture of each of the config's prompts, or of the one that is given.

        The noise that a picture begins with stays the same through a run, whose seed it follows: so
        pictures of one prompt show the training.

        part: this rank's share. It computes as many as any other rank, some of them again.
        """
        prompts = self.data.prompts if prompt is None else [prompt]
        own = range(part.number, len(prompts), part.of)
        rounds = -(-len(prompts) // part.of)
        pictures = [
            self._picture(model, prompts[number], number, seed - step)
            for number in [*own, *[0] * (rounds - len(own))]
        ]
        return pictures[: len(own)]

    def _picture(self, model: Any, prompt: str, number: int, seed: int) -> NDArray[np.uint8]:
        noise = first_noise(seed, number, self._training.noise_shape())
        return as_picture(self._training.draw(model, prompt, noise))

    def facts(self) -> Mapping[str, Any]:
        training = self._training
        width, height = max(
            self.pictures.train.bucket_shapes, key=lambda shape: shape[0] * shape[1]
        )
        lines = [f"data {line}" for line in self.pictures.lines]
        return {
            **forward_costs(self.model, lambda: training.one_row(width, height)),
            "library_bytes": _LIBRARY_BYTES,
            "notes": (f"{training.description}, diffusers {version('diffusers')}", *lines),
        }
