"""The timeseries task with PyTorch."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samecurve.core.determinism.mean import Mean
from samecurve.core.evaluation.confusion import CLASS_WEIGHT
from samecurve.core.protocols import Arrays
from samecurve.core.sample_numbers import rng
from samecurve.tasks.confusion import count_answers
from samecurve.tasks.timeseries.augment import drop_channels, jitter, scale, warp_time
from samecurve.tasks.timeseries.costs import cost_facts
from samecurve.tasks.timeseries.models import build_model
from samecurve.tasks.timeseries.task import WINDOW_PREFIX, TimeSeriesTask


class TorchTimeSeries(TimeSeriesTask):
    """A sample's loss counts as much as its class weighs; the sum is divided by those weights once,
    so classes that meet unevenly on devices or in microbatches change nothing.
    """

    def model(self) -> nn.Module:
        return build_model(
            self.fields,
            channels=self.model_channels,
            length=self.format.length,
            classes=len(self.format.classes),
        )

    def loss(self, model: Any, batch: Arrays) -> Mean:
        return self._mean(_logits(model, self._augmented(batch)), batch["label"])

    def metrics(self, model: Any, batch: Arrays) -> Mapping[str, Mean]:
        """confusion: [label, answer], how many rows are so; of windows in mode flatten, how many of
        their channels, and window_confusion, by the mean of the channels' probabilities.
        """
        if self.data.mode != "flatten":
            logits, labels = _logits(model, batch["x"]), batch["label"]
            return self._measured(logits, labels)
        rows, channels, time = batch["x"].shape
        logits = _logits(model, batch["x"].reshape(rows * channels, 1, time))
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
        weights = logits.new_tensor(self.format.class_weights)
        error = F.cross_entropy(
            logits,
            labels,
            weight=weights,
            label_smoothing=self.fields.label_smoothing,
            reduction="none",
        )
        return Mean(error.sum(), weights[labels].sum())

    def _augmented(self, batch: Arrays) -> Tensor:
        x: Tensor = batch["x"]
        augment = self.data.augment
        if not augment.is_on:
            return x
        numbers = rng(batch)
        if augment.time_warp:
            x = warp_time(x, numbers, augment.time_warp)
        if augment.scale:
            x = scale(x, numbers, augment.scale)
        if augment.jitter:
            x = jitter(x, numbers, augment.jitter)
        if augment.channel_dropout:
            x = drop_channels(x, numbers, augment.channel_dropout)
        return x

    def facts(self) -> Mapping[str, Any]:
        shape = (1, self.model_channels, self.format.length)
        weights = zip(self.format.classes, self.format.class_weights, strict=True)
        return {
            **cost_facts(self.model, shape),
            "reference": {f"{CLASS_WEIGHT}{name}": weight for name, weight in weights},
            "notes": tuple(self.notes()),
        }


def _logits(model: Any, x: Tensor) -> Tensor:
    """[rows, classes], at least float32."""
    logits = model(x)
    wide: Tensor = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide
