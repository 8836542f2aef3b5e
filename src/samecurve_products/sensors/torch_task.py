"""The timeseries task with PyTorch."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from samecurve.core.evaluation import CLASS_WEIGHT
from samecurve.seam import Arrays, Mean, rng
from samecurve_products.sensors.augment import drop_channels, jitter, scale, warp_time
from samecurve_products.sensors.models import build_model
from samecurve_products.sensors.task import WINDOW_PREFIX, TimeSeriesTask
from samecurve_products.task_parts.classifier_loss import class_loss, count_answers, widened
from samecurve_products.task_parts.forward_costs import forward_costs


class TorchTimeSeries(TimeSeriesTask):
    def model(self) -> nn.Module:
        return build_model(
            self.fields,
            channels=self.model_channels,
            length=self.format.length,
            classes=len(self.format.classes),
        )

    def loss(self, model: Any, batch: Arrays) -> Mean:
        return self._mean(widened(model(self._augmented(batch))), batch["label"])

    def metrics(self, model: Any, batch: Arrays) -> Mapping[str, Mean]:
        """Loss, and confusion: how many rows have each [label, answer].

        In mode flatten the rows are single channels; window_confusion counts whole windows, whose
        answer is the class of the highest mean probability over their channels.
        """
        if self.data.mode != "flatten":
            logits, labels = widened(model(batch["x"])), batch["label"]
            return self._measured(logits, labels)
        rows, channels, time = batch["x"].shape
        logits = widened(model(batch["x"].reshape(rows * channels, 1, time)))
        measured = self._measured(logits, batch["label"].repeat_interleave(channels))
        chances = logits.softmax(-1).view(rows, channels, -1).mean(1)
        counts = count_answers(batch["label"], chances.argmax(-1), chances.shape[-1])
        if "window" in batch:  # a row is one channel: its window's others are in other rows
            counts = torch.zeros_like(counts)
        return {**measured, f"{WINDOW_PREFIX}confusion": Mean(counts, 1)}

    def _measured(self, logits: Tensor, labels: Tensor) -> dict[str, Mean]:
        counts = count_answers(labels, logits.argmax(-1), logits.shape[-1])
        return {"loss": self._mean(logits, labels), "confusion": Mean(counts, 1)}

    def _mean(self, logits: Tensor, labels: Tensor) -> Mean:
        return class_loss(logits, labels, self.format.class_weights, self.fields.label_smoothing)

    def _augmented(self, batch: Arrays) -> Tensor:
        x: Tensor = batch["x"]
        augment = self.data.augment
        changes = {
            warp_time: augment.time_warp,
            scale: augment.scale,
            jitter: augment.jitter,
            drop_channels: augment.channel_dropout,
        }
        if any(changes.values()):
            numbers = rng(batch)
            for change, extent in changes.items():
                x = change(x, numbers, extent) if extent else x
        return x

    def facts(self) -> Mapping[str, Any]:
        shape = (1, self.model_channels, self.format.length)
        weights = zip(self.format.classes, self.format.class_weights, strict=True)
        return {
            **forward_costs(self.model, lambda model: model(torch.zeros(shape))),
            "reference": {f"{CLASS_WEIGHT}{name}": weight for name, weight in weights},
            "notes": tuple(self.notes()),
        }
