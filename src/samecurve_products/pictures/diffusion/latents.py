"""How a pipeline's denoiser is trained on latents, and how it makes pictures."""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from samecurve.seam import Arrays, SampleNumbers, UserError
from samecurve_products.pictures.diffusion.data.samples import Samples
from samecurve_products.pictures.diffusion.denoiser import Denoiser
from samecurve_products.pictures.diffusion.families.denoising import sample
from samecurve_products.pictures.diffusion.families.pipeline import family_of, open_pipeline
from samecurve_products.pictures.diffusion.frozen_encoders import (
    SIZE,
    TEXT,
    FrozenEncoders,
    LatentRows,
)
from samecurve_products.pictures.diffusion.objective import Denoising, Flow, Objective, Predict

if TYPE_CHECKING:
    from samecurve_products.pictures.diffusion.families.schedule import Schedule
    from samecurve_products.pictures.diffusion.task import DiffusionTask


class LatentTraining:
    """The training of a pipeline's denoiser.

    denoiser: the part that is trained. encoders: the parts that are frozen
    """

    def __init__(self, task: "DiffusionTask") -> None:
        self._data, self._fields = task.data, task.fields
        assert task.fields.place is not None
        self._opened = open_pipeline(task.fields.place, task.fields.base_place)
        self._family = family_of(self._opened)
        self.denoiser = Denoiser(self._opened, task.fields, task.data)
        self.encoders = FrozenEncoders(self._family, task.fields, task.data, task.cache)

    @property
    def lines(self) -> list[str]:
        """What is trained, for the user."""
        kind = self._opened.kind
        first = f"{kind.name}, its {kind.component} is trained to predict {self._prediction}"
        return [first, *self._opened.notes, *self.denoiser.describe()]

    @property
    def multiple(self) -> int:
        """The sides of pictures are multiples of it."""
        return self._opened.multiple

    def rows(self, samples: Samples, *, augmented: bool) -> LatentRows:
        return LatentRows(self.encoders, samples, augmented=augmented)

    def model(self) -> nn.Module:
        return self.denoiser.model()

    @cached_property
    def _schedule(self) -> "Schedule":
        return self._family.schedule

    @property
    def _prediction(self) -> str:
        """What the denoiser predicts. UserError: the config wants something else."""
        own = self._schedule.prediction
        if self._fields.prediction not in {"auto", own}:
            raise UserError(
                f"model.prediction {self._fields.prediction}: {self._opened.place} predicts {own},"
                " by its scheduler",
                "leave model.prediction out: weights that predict one thing are no beginning for"
                " another",
                "model.prediction",
            )
        return own

    def objective(self, latents: Tensor) -> Objective:
        """What is learnt of latents of this shape: larger pictures may see more noise."""
        fields, schedule = self._fields, self._schedule
        if self._prediction == "flow":
            factor = self._opened.factor
            height, width = (side * factor for side in latents.shape[-2:])
            return Flow(fields.time_steps, schedule.shift(self._family.tokens(height, width)))
        assert schedule.alphas_cumprod is not None
        is_epsilon = self._prediction == "epsilon"
        alphas = schedule.alphas_cumprod.tolist()
        return Denoising(alphas, "epsilon" if is_epsilon else "v", fields.min_snr)

    def pictures(self, batch: Arrays, numbers: SampleNumbers) -> Tensor:
        """Latents that are drawn from their means and deviations: [rows, channels, h, w]."""
        moments: Tensor = batch["latents"]
        mean, deviation = moments[:, 0], moments[:, 1]
        dtype = "float64" if moments.dtype == torch.float64 else "float32"
        drawn: Tensor = mean + deviation * numbers.normal(*mean.shape[1:], dtype=dtype)
        return drawn

    def mask(self, batch: Arrays) -> Tensor | None:
        """What each place of the latents counts, [rows, 1, h, w]; None: all alike."""
        mask: Tensor | None = batch.get("mask")
        return None if mask is None else mask[:, None]

    def predict(self, model: Any, batch: Mapping[str, Tensor]) -> Predict:
        conditions = {
            name.removeprefix(prefix): array
            for prefix in (TEXT, SIZE)
            for name, array in batch.items()
            if name.startswith(prefix)
        }
        guided = self._family.with_guidance(conditions, _UNGUIDED)
        return lambda noisy, time: self._family.predict(model, noisy, time, guided)

    def noise_shape(self) -> tuple[int, int, int]:
        """The shape of the latents of a picture that is shown."""
        return self._family.latent_shape(self._data.resolution, self._data.resolution)

    @torch.no_grad()
    def draw(self, model: Any, prompt: str, noise: Tensor) -> Tensor:
        """Pixels [3, height, width] of one prompt. noise: [1, channels, h, w]"""
        parameter = next(p for p in model.parameters() if p.is_floating_point())
        wide = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        parts = self.encoders.parts(parameter.device)
        positive, negative = self.encoders.shown(prompt, parts, parameter.device)
        parts.release(*self._opened.encoders)
        return sample(
            self._family,
            parts,
            model,
            noise.to(parameter.device, wide),
            conditions=positive,
            negative=negative,
            steps=self._data.sample_steps,
            guidance=self._data.guidance,
        )[0]

    def row_runner(self, width: int, height: int) -> Callable[[nn.Module], None]:
        """A function that calls the denoiser on one picture of these sides, without values."""
        size = (height, width)
        sizes = self._family.size_conditions(original=size, corner=(0, 0), size=size)
        outline = {
            **self._family.caption_outline(),
            **{name: (1, len(row)) for name, row in sizes.items()},
        }
        time_type = torch.float32 if self._prediction == "flow" else torch.long

        def run(model: nn.Module) -> None:
            zeros = {
                name: torch.zeros(shape) if isinstance(shape, tuple) else shape
                for name, shape in outline.items()
            }
            conditions = self._family.with_guidance(zeros, _UNGUIDED)
            latents = torch.zeros(1, *self._family.latent_shape(height, width))
            self._family.predict(model, latents, torch.zeros(1, dtype=time_type), conditions)

        return run


_UNGUIDED = 1.0  # the guidance that a distilled denoiser is told in training
