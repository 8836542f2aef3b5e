"""The objective of sentence embeddings: each anchor finds its positive among the batch's texts.

The loss is computed once, over the vectors of the whole batch, so the negatives are the same on any
number of devices. With cosines s over temperature t: InfoNCE, the mean over rows of
-log(exp(s_ii / t) / sum_j exp(s_ij / t)), j over all positives and negatives; symmetric: the
mean of this and the same over columns. Source: van den Oord et al. 2018, arXiv:1807.03748;
Radford et al. 2021, arXiv:2103.00020, for the symmetric form.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from samecurve.seam import Arrays, Mean
from samecurve_products.task_parts.classifier_loss import widened
from samecurve_products.text.huggingface.causal import suit_experts
from samecurve_products.text.huggingface.sections import Embedding

_TEXTS = ("anchor", "positive", "negative")


class Embed:
    """Features of a microbatch, and the loss of the whole batch."""

    def __init__(self, fields: Embedding) -> None:
        self._fields = fields

    def features(self, model: Any, batch: Arrays) -> dict[str, Tensor]:
        """A vector of length 1 for each text, [rows, hidden] each, at least float32."""
        tokens, real = batch["input_ids"], batch["documents"] > 0
        return {
            name: self.embed(model, tokens[:, number], real[:, number])
            for number, name in enumerate(_TEXTS[: tokens.shape[1]])
        }

    def embed(self, model: Any, tokens: Tensor, real: Tensor) -> Tensor:
        """Vectors [rows, hidden] of texts. tokens, real (no padding): [rows, width]."""
        suit_experts(model)
        hidden = model(input_ids=tokens, attention_mask=real.long()).last_hidden_state
        wide = widened(hidden)
        if self._fields.pooling == "cls":
            return F.normalize(wide[:, 0], dim=-1)
        counted = real[..., None].to(wide.dtype)
        return F.normalize((wide * counted).sum(1) / counted.sum(1), dim=-1)

    def batch_loss(self, features: Mapping[str, Tensor]) -> Mapping[str, Mean]:
        """Loss, and accuracy: the share of anchors whose nearest text is their own positive."""
        anchors, count = features["anchor"], len(features["anchor"])
        others = torch.cat([features[name] for name in _TEXTS[1:] if name in features])
        scores = anchors @ others.T / self._fields.temperature
        own = torch.arange(count, device=scores.device)
        error = F.cross_entropy(scores, own, reduction="sum")
        if self._fields.symmetric:
            back = F.cross_entropy(scores[:, :count].T, own, reduction="sum")
            error = (error + back) / 2
        return {
            "loss": Mean(error, count),
            "accuracy": Mean((scores.argmax(-1) == own).sum(), count),
        }
