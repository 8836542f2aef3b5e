"""The diffusion task with PyTorch: loss, validation and pictures, under every strategy."""

from collections.abc import Mapping
from functools import cached_property
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from samecurve.core.determinism.mean import Mean
from samecurve.core.protocols import WHOLE, Arrays, Part
from samecurve.core.sample_numbers import rng
from samecurve.tasks.diffusion.new_family import (
    new_objective,
    predict_pixels,
    sample_pixels,
)
from samecurve.tasks.diffusion.new_models import build_model
from samecurve.tasks.diffusion.objective import EVAL_TIMES, row_losses
from samecurve.tasks.diffusion.sampling import as_picture, first_noise
from samecurve.tasks.diffusion.task import DiffusionTask
from samecurve.tasks.forward_costs import forward_costs

_LIBRARY_BYTES = 90 << 20  # memory of diffusers in a process


class TorchDiffusion(DiffusionTask):
    metric_names = ("loss",)

    @cached_property
    def _objective(self) -> Any:
        return new_objective(self.fields)

    def model(self) -> nn.Module:
        return build_model(self.fields, self.words, self.data.resolution)

    def loss(self, model: Any, batch: Arrays) -> Mean:
        return self._mean(model, batch, times=1)

    def metrics(self, model: Any, batch: Arrays) -> Mapping[str, Mean]:
        """The loss with the same noise at the same times of each picture, whenever it is asked."""
        return {"loss": self._mean(model, batch, times=EVAL_TIMES)}

    def _mean(self, model: Any, batch: Arrays, *, times: int) -> Mean:
        weight = batch["weight"]
        pictures = batch["pixels"].to(weight.dtype) / 127.5 - 1
        losses = row_losses(
            self._objective,
            lambda noisy, time: predict_pixels(model, noisy, time, batch["words"]),
            pictures,
            rng(batch),
            times=times,
            mask=batch.get("mask"),
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
        numbers = [*own, *[0] * (rounds - len(own))]
        pictures = [
            self._picture(model, prompts[number], first_noise(seed - step, number, self._shape))
            for number in numbers
        ]
        return pictures[: len(own)]

    @property
    def _shape(self) -> tuple[int, int, int]:
        """The shape of the pictures that are shown."""
        return 3, self.data.resolution, self.data.resolution

    def _picture(self, model: Any, prompt: str, noise: Tensor) -> NDArray[np.uint8]:
        pixels = sample_pixels(
            model,
            self.fields,
            self.words,
            (prompt, self.data.negative_prompt),
            noise,
            steps=self.data.sample_steps,
            guidance=self.guidance,
        )
        return as_picture(pixels)

    def _one_row(self) -> tuple[Tensor, ...]:
        """The model's arguments for one picture of the largest bucket."""
        words = torch.ones(1, self.words.length, dtype=torch.long)
        return torch.zeros(1, 3, *self.largest_sides), torch.zeros(1), words

    def facts(self) -> Mapping[str, Any]:
        return {
            **forward_costs(self.model, self._one_row),
            "library_bytes": _LIBRARY_BYTES,
            "notes": (f"{self._description}; {version('diffusers')} of diffusers", *self.notes()),
        }
