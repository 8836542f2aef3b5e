"""The diffusion task with PyTorch: loss, validation and pictures, under every strategy."""

import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from samecurve.core.protocols import WHOLE
from samecurve.seam import Arrays, Mean, Part, Source, rng
from samecurve.tasks.protocol import ExportedFile
from samecurve.torch_engine.model.model_setup import name_blocks
from samecurve_products.pictures.diffusion.data.buckets import check_sides
from samecurve_products.pictures.diffusion.objective import EVAL_TIMES, row_losses
from samecurve_products.pictures.diffusion.sampling import as_picture, first_noise
from samecurve_products.pictures.diffusion.sections import DiffusionData, DiffusionModel
from samecurve_products.pictures.diffusion.task import DiffusionTask
from samecurve_products.pictures.diffusion.whole_modules import whole_modules
from samecurve_products.task_parts.forward_costs import forward_costs

if TYPE_CHECKING:
    from samecurve_products.pictures.diffusion.latents import LatentTraining
    from samecurve_products.pictures.diffusion.pixels import PixelTraining

_LIBRARY_BYTES = 90 << 20  # memory of diffusers in a process


class TorchDiffusion(DiffusionTask):
    """Pictures from noise: by a pipeline's denoiser (latents.py), or a new model (pixels.py)."""

    metric_names = ("loss",)

    def __init__(
        self,
        model: DiffusionModel,
        data: DiffusionData,
        cache: Path,
        assets: Path | None = None,
    ) -> None:
        super().__init__(model, data, cache, assets)
        if model.place is not None:  # a new model has neither
            self.prepare, self.init_module = self._encode, self._first_values

    @cached_property
    def training(self) -> "LatentTraining | PixelTraining":
        """What differs between a pipeline and a new model."""
        if self.fields.place is not None:
            from samecurve_products.pictures.diffusion.latents import LatentTraining

            return LatentTraining(self)
        from samecurve_products.pictures.diffusion.pixels import PixelTraining

        return PixelTraining(self)

    def model(self) -> nn.Module:
        return self.training.model()

    def model_blocks(self, model: nn.Module) -> list[nn.Module]:
        """The smallest modules that diffusers keeps whole: a stage of a UNet, which may hold half
        of its numbers, is many of them.
        """
        return whole_modules(model)

    @property
    def _latents(self) -> "LatentTraining":
        """The training of a pipeline."""
        from samecurve_products.pictures.diffusion.latents import LatentTraining

        assert isinstance(self.training, LatentTraining)
        return self.training

    def _first_values(self, model: nn.Module, module: nn.Module) -> None:
        """Set a module's first values; those of a pipeline's own weights come from its files."""
        del model
        self._latents.denoiser.first_values(module)

    def convert_weights(self, arrays: Mapping[str, Any]) -> Mapping[str, Any]:
        """A pipeline's arrays as the model holds them."""
        if self.fields.place is None:
            return arrays
        return self._latents.denoiser.convert_weights(arrays)

    def read_adapter(
        self,
        arrays: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
        metadata: Mapping[str, str],
    ) -> tuple[Mapping[str, Any], list[str]]:
        """An adapter's file by the names of the model's arrays, and lines for the user."""
        return self._latents.denoiser.read_adapter(arrays, shapes, metadata)

    def train_data(self) -> Source:
        check_sides(self.data, self.training.multiple)
        return self.training.rows(self.pictures.train, augmented=True)

    def eval_data(self) -> Source | None:
        held_out = self.pictures.held_out
        return None if held_out is None else self.training.rows(held_out, augmented=False)

    def fingerprint(self) -> str:
        return self.training.rows(self.pictures.train, augmented=True).fingerprint()

    def _encode(self, device: Any, part: Part) -> Iterator[tuple[int, int]]:
        """Encode a part of the captions and pictures, each once."""
        encoders = self._latents.encoders
        samples = [(self.pictures.train, True), (self.pictures.held_out, False)]
        views = [
            encoders.views(each, augmented=augmented)
            for each, augmented in samples
            if each is not None
        ]
        yield from encoders.prepare(views, device, part)

    def loss(self, model: Any, batch: Arrays) -> Mean:
        return self._mean(model, batch, times=1)

    def metrics(self, model: Any, batch: Arrays) -> Mapping[str, Mean]:
        """The loss with the same noise at the same times of each picture, whenever it is asked."""
        return {"loss": self._mean(model, batch, times=EVAL_TIMES)}

    def _mean(self, model: Any, batch: Arrays, *, times: int) -> Mean:
        training, numbers, weight = self.training, rng(batch), batch["weight"]
        pictures = training.pictures(batch, numbers)
        losses = row_losses(
            training.objective(pictures),
            training.predict(model, batch),
            pictures,
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
        noise = first_noise(seed, number, self.training.noise_shape())
        return as_picture(self.training.draw(model, prompt, noise))

    @property
    def exports(self) -> Mapping[str, str]:
        """The formats that the model is exported in, beside plain safetensors."""
        return {} if self.fields.place is None else self._latents.denoiser.exports

    @property
    def export_format(self) -> str:
        return next(iter(self.exports), "safetensors")

    def export_as(
        self, form: str, tensors: Mapping[str, Any], directory: Path, dtype: str
    ) -> ExportedFile:
        """The weights in one of `exports`; the files beside them are written."""
        del dtype
        return self._latents.denoiser.export_as(form, tensors, directory)

    def _model_with_blocks(self) -> nn.Module:
        model = self.model()
        name_blocks(self.model_blocks(model))
        return model

    def facts(self) -> Mapping[str, Any]:
        training = self.training
        width, height = max(self.pictures.train.bucket_shapes, key=math.prod)
        lines = [f"data {line}" for line in self.pictures.lines]
        return {
            **forward_costs(self._model_with_blocks, training.row_runner(width, height)),
            "library_bytes": _LIBRARY_BYTES,
            "notes": (*training.lines, f"diffusers {version('diffusers')}", *lines),
        }
