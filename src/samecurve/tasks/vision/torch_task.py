"""The vision task with PyTorch."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samecurve.core.determinism.mean import Mean
from samecurve.core.protocols import Arrays
from samecurve.core.sample_numbers import rng
from samecurve.tasks.classifier_loss import count_answers, widened
from samecurve.tasks.forward_costs import forward_costs
from samecurve.tasks.vision.layout import skip_rates
from samecurve.tasks.vision.task import TOP, VisionTask
from samecurve.tasks.vision.torch_model import Classifier


class TorchVision(VisionTask):
    def model(self) -> nn.Module:
        return Classifier(
            self.fields, self.grid, channels=self.format.shape[2], classes=self.num_classes
        )

    def loss(self, model: Any, batch: Arrays) -> Mean:
        kept, features = self._factors(batch)
        logits = widened(model(self._normalized(model, batch["pixels"]), kept, features))
        return self._mean(logits, batch)

    def metrics(self, model: Any, batch: Arrays) -> Mapping[str, Mean]:
        """Loss, near answers, and confusion: how many images have each [label, answer]."""
        logits, labels = widened(model(self._normalized(model, batch["pixels"]))), batch["labels"]
        counts = count_answers(labels, logits.argmax(-1), logits.shape[-1])
        likelier = (logits > logits.gather(-1, labels[:, None])).sum(-1)
        return {
            "loss": self._mean(logits, {"labels": labels}),
            "confusion": Mean(counts, 1),
            "top5": Mean((likelier < TOP).sum(), labels.shape[0]),
        }

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
            rates = torch.tensor(
                skip_rates(fields), dtype=torch.float32, device=batch["labels"].device
            )
            kept = (rng(batch).uniform(fields.depth) >= rates).float() / (1 - rates)
        if fields.dropout:
            drawn = rng(batch).uniform(fields.width) >= fields.dropout
            features = drawn.float() / (1 - fields.dropout)
        return kept, features

    def _normalized(self, model: nn.Module, pixels: Tensor) -> Tensor:
        """Pixels with mean and deviation taken out, in the type of the model's parameters."""
        dtype = next(iter(model.parameters())).dtype
        values = pixels.to(dtype) / (255 if pixels.dtype == torch.uint8 else 1)
        mean, std = (values.new_tensor(of) for of in (self.format.mean, self.format.std))
        return (values - mean) / std

    def facts(self) -> Mapping[str, Any]:
        shape = (1, *self.format.shape)
        return {
            **forward_costs(self.model, lambda model: model(torch.zeros(shape))),
            **self.about_images(),
        }
