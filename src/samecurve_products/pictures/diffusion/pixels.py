"""New models of pixels: their data, what they learn, and the pictures that they make."""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from samecurve.seam import Arrays, Ids, SampleNumbers
from samecurve_products.pictures.diffusion.data.samples import Samples
from samecurve_products.pictures.diffusion.data.source import PixelRows
from samecurve_products.pictures.diffusion.new_models import build_model, side_multiple
from samecurve_products.pictures.diffusion.objective import Denoising, Flow, Objective, Predict
from samecurve_products.pictures.diffusion.sampling import denoise
from samecurve_products.pictures.diffusion.sections import DiffusionModel
from samecurve_products.pictures.diffusion.words import Words

if TYPE_CHECKING:
    from samecurve_products.pictures.diffusion.task import DiffusionTask

_TRAINED = 1000.0  # time steps of a new model's scheduler; the model takes times from 0 to 1


class Rows:
    """Rows of pixels, with the words of their captions as numbers."""

    def __init__(self, pixels: PixelRows, words: Words) -> None:
        self._pixels, self._words = pixels, words
        self.bucket_sizes = pixels.bucket_sizes

    def __len__(self) -> int:
        return len(self._pixels)

    def __getitem__(self, ids: Ids, epoch: int = 0) -> dict[str, NDArray[Any]]:
        captions = self._pixels.captions(ids, epoch)
        return {**self._pixels.__getitem__(ids, epoch), "words": self._words.encode(captions)}

    def fingerprint(self) -> str:
        return self._pixels.fingerprint()


class PixelTraining:
    """How a new model is trained and used."""

    def __init__(self, task: "DiffusionTask") -> None:
        self._task, self._fields = task, task.fields

    @property
    def lines(self) -> list[str]:
        """What is trained, for the user."""
        kind = "flow" if _is_flow(self._fields) else self._fields.prediction
        words = f"{len(self._task.words):,} words"
        return [f"a new {self._fields.architecture} of pixels that predicts {kind}; {words}"]

    def rows(self, samples: Samples, *, augmented: bool) -> Rows:
        pixels = PixelRows(samples, self._task.data, augmented=augmented)
        return Rows(pixels, self._task.words)

    def model(self) -> nn.Module:
        return build_model(self._fields, self._task.words, self._task.data.resolution)

    @property
    def multiple(self) -> int:
        """The sides of pictures are multiples of it."""
        return side_multiple(self._fields)

    def objective(self, pictures: Tensor) -> Objective:
        """What the model learns, the same for pictures of any size."""
        del pictures
        return self._objective

    @cached_property
    def _objective(self) -> Objective:
        """The noise levels are those of the scheduler."""
        if _is_flow(self._fields):
            return Flow(self._fields.time_steps)
        alphas = _scheduler(self._fields).alphas_cumprod.double().tolist()
        is_epsilon = self._fields.prediction == "epsilon"
        return Denoising(alphas, "epsilon" if is_epsilon else "v", self._fields.min_snr)

    def pictures(self, batch: Arrays, numbers: SampleNumbers) -> Tensor:
        """What noise is added to: [rows, 3, height, width], from -1 to 1."""
        del numbers
        pixels: Tensor = batch["pixels"].to(batch["weight"].dtype)
        return pixels / 127.5 - 1

    def mask(self, batch: Arrays) -> Tensor | None:
        mask: Tensor | None = batch.get("mask")
        return None if mask is None else mask[:, None]

    def predict(self, model: Any, batch: Mapping[str, Tensor]) -> Predict:
        return lambda noisy, time: _answer(model, noisy, time, batch["words"])

    def noise_shape(self) -> tuple[int, int, int]:
        """The shape of a picture that is shown."""
        side = self._task.data.resolution
        return 3, side, side

    @torch.no_grad()
    def draw(self, model: Any, prompt: str, noise: Tensor) -> Tensor:
        """Pixels [3, height, width] of one prompt. noise: [1, 3, height, width]"""
        data, parameter = self._task.data, next(model.parameters())
        encoded = self._task.words.encode([prompt, data.negative_prompt])
        words = torch.from_numpy(encoded).to(parameter.device)

        def guided(noisy: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
            answer = _answer(model, torch.cat([noisy, noisy]), torch.cat([time, time]), words)
            return answer[:1], answer[1:]

        return denoise(
            _scheduler(self._fields),
            noise.to(parameter.device, parameter.dtype),
            guided,
            steps=data.sample_steps,
            guidance=self._task.guidance,
            flow=_is_flow(self._fields),
        )[0]

    def row_runner(self, width: int, height: int) -> Callable[[nn.Module], None]:
        """A function that calls the model on one picture of these sides, without values."""
        length = self._task.words.length

        def run(model: nn.Module) -> None:
            words = torch.ones(1, length, dtype=torch.long)
            model(torch.zeros(1, 3, height, width), torch.zeros(1), words)

        return run


def _answer(model: Any, noisy: Tensor, time: Tensor, words: Tensor) -> Tensor:
    """What the model says. time: from 0 to 1, or whole time steps of its scheduler"""
    fraction = time if time.is_floating_point() else time / _TRAINED
    answer: Tensor = model(noisy, fraction.to(noisy.dtype), words)
    return answer


def _is_flow(fields: DiffusionModel) -> bool:
    return fields.prediction in {"auto", "flow"}


def _scheduler(fields: DiffusionModel) -> Any:
    """The scheduler of diffusers by which a new model is sampled."""
    if _is_flow(fields):
        from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
            FlowMatchEulerDiscreteScheduler,
        )

        return FlowMatchEulerDiscreteScheduler(shift=fields.time_steps.shift or 1.0)
    from diffusers.schedulers.scheduling_ddim import DDIMScheduler

    kind = "epsilon" if fields.prediction == "epsilon" else "v_prediction"
    return DDIMScheduler(
        prediction_type=kind,
        clip_sample=True,
        rescale_betas_zero_snr=fields.prediction == "v",
        timestep_spacing="trailing",
    )
