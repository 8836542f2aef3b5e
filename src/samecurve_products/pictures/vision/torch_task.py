"""The vision task with PyTorch."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from samecurve.core.protocols import Sample
from samecurve.seam import Arrays, Mean, Picture, rng
from samecurve_products.lora import StoredArray
from samecurve_products.pictures.vision.backbone import Backbone, unlike_backbone
from samecurve_products.pictures.vision.filters import filter_pictures, is_of_a_filter
from samecurve_products.pictures.vision.layout import skip_rates
from samecurve_products.pictures.vision.task import TOP, VisionTask
from samecurve_products.pictures.vision.torch_model import Classifier
from samecurve_products.pictures.vision.wrong_answers import wrong_answers
from samecurve_products.task_parts.classifier_loss import count_answers, widened
from samecurve_products.task_parts.forward_costs import forward_costs
from samecurve_products.task_parts.on_device import on_device


class TorchVision(VisionTask):
    @cached_property
    def backbone(self) -> Backbone | None:
        """The model of timm; None: the model is ours."""
        if self.fields.backbone is None:
            return None
        return Backbone(self.fields, self.format.shape, self.num_classes)

    def model(self) -> nn.Module:
        if self.backbone is not None:
            return self.backbone.build()
        return Classifier(
            self.fields, self.grid, channels=self.format.shape[2], classes=self.num_classes
        )

    def loss(self, model: Any, batch: Arrays) -> Mean:
        factors = () if self.backbone is not None else self._factors(batch)
        return self._mean(self._logits(model, batch, *factors), batch)

    def convert_weights(self, arrays: Mapping[str, StoredArray]) -> Mapping[str, StoredArray]:
        """A source's arrays as the model has them; of a backbone with a head for these classes."""
        return arrays if self.backbone is None else self.backbone.first_arrays(arrays)

    def unlike(self, fields: Mapping[str, Any]) -> tuple[Sequence[str], Sequence[str]]:
        return unlike_backbone(self.fields, fields)

    def metrics(self, model: Any, batch: Arrays) -> Mapping[str, Mean]:
        """Loss, near answers, and confusion: how many images have each [label, answer]."""
        logits, labels = self._logits(model, batch), batch["labels"]
        counts = count_answers(labels, logits.argmax(-1), logits.shape[-1])
        likelier = (logits > logits.gather(-1, labels[:, None])).sum(-1)
        return {
            "loss": self._mean(logits, {"labels": labels}),
            "confusion": Mean(counts, 1),
            "top5": Mean((likelier < TOP).sum(), labels.shape[0]),
        }

    def sample(self, model: Any, seed: int) -> Sequence[Sample]:
        """Held-out images that the model answers wrongly, and filters. seed: nothing is drawn"""
        del seed
        device = next(iter(model.parameters())).device

        @torch.no_grad()
        def answer(rows: dict[str, NDArray[Any]]) -> NDArray[Any]:
            batch = {"pixels": torch.from_numpy(np.ascontiguousarray(rows["pixels"])).to(device)}
            chances: NDArray[Any] = self._logits(model, batch).softmax(-1).cpu().numpy()
            return chances

        wrong = wrong_answers(self.images.validation, answer, self.format.classes)
        return [*wrong, *self._filters(model)]

    def _filters(self, model: nn.Module) -> list[Picture]:
        """Pictures of what the blocks have learnt. A sharded parameter is gathered by all ranks."""
        if self.backbone is not None:
            return []
        parameters = {}
        for name, value in model.named_parameters():
            if is_of_a_filter(name):
                whole = value.full_tensor() if hasattr(value, "full_tensor") else value
                parameters[name] = whole.detach().cpu().numpy()
        return filter_pictures(parameters, self.grid)

    def _logits(self, model: Any, batch: Arrays, *factors: Tensor | None) -> Tensor:
        """The model's answers. factors: of a model of ours, what dropout multiplies with."""
        pixels = self._normalized(model, batch["pixels"])
        if self.backbone is not None:
            pixels = pixels.permute(0, 3, 1, 2)  # timm's models take channels first
        return widened(model(pixels, *factors))

    def _mean(self, logits: Tensor, batch: Arrays) -> Mean:
        """Cross-entropy; of a mixed image, with the share that each of its labels has."""
        errors = self._errors(logits, batch["labels"])
        if "mix" in batch:
            share = batch["mix"].to(errors.dtype)
            errors = share * errors + (1 - share) * self._errors(logits, batch["labels_2"])
        return Mean(errors.sum(), logits.shape[0])

    def _errors(self, logits: Tensor, labels: Tensor) -> Tensor:
        smoothing = self.fields.label_smoothing
        return F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="none")

    def _factors(self, batch: Arrays) -> tuple[Tensor | None, Tensor | None]:
        """What dropout and stochastic depth multiply with, by numbers that follow the sample."""
        fields, kept, features = self.fields, None, None
        if fields.drop_path:
            rates = torch.tensor(skip_rates(fields), dtype=torch.float32)
            rates = on_device(rates, batch["labels"].device)
            kept = (rng(batch).uniform(fields.depth) >= rates).float() / (1 - rates)
        if fields.dropout:
            drawn = rng(batch).uniform(fields.width) >= fields.dropout
            features = drawn.float() / (1 - fields.dropout)
        return kept, features

    def _normalized(self, model: nn.Module, pixels: Tensor) -> Tensor:
        """Pixels with mean and deviation taken out, in the type of the model's parameters."""
        dtype = next(iter(model.parameters())).dtype
        values = pixels.to(dtype) / (255 if pixels.dtype == torch.uint8 else 1)
        scales = torch.tensor([self.format.mean, self.format.std], dtype=dtype)
        mean, std = on_device(scales, values.device)
        normalized: Tensor = (values - mean) / std
        return normalized

    def facts(self) -> Mapping[str, Any]:
        shape = (1, *self.format.sample_shape)
        about = self.about_images()
        if self.backbone is not None:
            height, width, channels = self.format.shape
            shape = (1, channels, height, width)
            lines = self.backbone.notes(self.format.mean, self.format.std)
            about["notes"] = (*about["notes"], *lines)
        # in eval mode: one sample may be too few for the statistics of a BatchNorm
        costs = forward_costs(self.model, lambda model: model.eval()(torch.zeros(shape)))
        return {**costs, **about}
