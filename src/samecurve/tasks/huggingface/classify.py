"""The objective of a classifier of texts: the label of each.

A sample's loss counts as much as its class weighs; the sum is divided by those weights once, so
classes that meet unevenly on devices or in microbatches change nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from samecurve.core.determinism.mean import Mean
from samecurve.core.protocols import Arrays
from samecurve.tasks.confusion import count_answers
from samecurve.tasks.huggingface.causal import suit_experts


class Classify:
    """Loss and metrics of a microbatch. weights: of each class, by number."""

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights = list(weights)

    def loss(self, model: Any, batch: Arrays) -> Mean:
        return self._mean(self.logits(model, batch), batch["label"])

    def metrics(self, model: Any, batch: Arrays) -> Mapping[str, Mean]:
        """confusion: [label, answer], how many samples."""
        logits, labels = self.logits(model, batch), batch["label"]
        answers = logits.argmax(-1)
        return {
            "loss": self._mean(logits, labels),
            "accuracy": Mean((answers == labels).sum(), len(labels)),
            "confusion": Mean(count_answers(labels, answers, len(self._weights)), 1),
        }

    def logits(self, model: Any, batch: Arrays) -> Tensor:
        """[rows, classes], at least float32."""
        suit_experts(model)
        mask = (batch["documents"] > 0).long()
        options = {}
        if "types" in batch and getattr(model.config, "type_vocab_size", 0) > 1:
            options["token_type_ids"] = batch["types"]
        logits = model(input_ids=batch["input_ids"], attention_mask=mask, **options).logits
        wide: Tensor = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return wide

    def _mean(self, logits: Tensor, labels: Tensor) -> Mean:
        weights = logits.new_tensor(self._weights)
        error = F.cross_entropy(logits, labels, weight=weights, reduction="none")
        return Mean(error.sum(), weights[labels].sum())


@torch.no_grad()
def say_classes(model: Any, rows: Mapping[str, NDArray[Any]], names: Sequence[str]) -> str:
    """Each class of a text with its probability, a line each, the likeliest first.

    rows: of that one text, without a dimension for samples
    """
    device = model.get_input_embeddings().weight.device
    batch = {name: torch.from_numpy(row)[None].to(device) for name, row in rows.items()}
    chances = Classify([]).logits(model, batch)[0].softmax(-1).tolist()
    order = sorted(range(len(chances)), key=lambda number: -chances[number])
    return "\n".join(f"{names[number]}  {chances[number]:.4f}" for number in order)
