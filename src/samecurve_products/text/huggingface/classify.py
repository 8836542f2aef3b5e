"""The objective of a classifier of texts: the label of each text."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from samecurve.seam import Arrays, Mean
from samecurve_products.task_parts.classifier_loss import class_loss, count_answers, widened
from samecurve_products.text.huggingface.causal import suit_experts


class Classify:
    """Loss and metrics of a microbatch. weights: by the number of the class."""

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights = list(weights)

    def loss(self, model: Any, batch: Arrays) -> Mean:
        return class_loss(self.logits(model, batch), batch["label"], self._weights)

    def metrics(self, model: Any, batch: Arrays) -> Mapping[str, Mean]:
        """Loss, accuracy, and confusion: how many samples have each [label, answer]."""
        logits, labels = self.logits(model, batch), batch["label"]
        answers = logits.argmax(-1)
        return {
            "loss": class_loss(logits, labels, self._weights),
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
        output = model(input_ids=batch["input_ids"], attention_mask=mask, **options)
        return widened(output.logits)


@torch.no_grad()
def say_classes(model: Any, rows: Mapping[str, NDArray[Any]], names: Sequence[str]) -> str:
    """The classes of a text with their probabilities, one a line, the likeliest first.

    rows: the arrays of the text, without a dimension for samples
    """
    device = model.get_input_embeddings().weight.device
    batch = {name: torch.from_numpy(row)[None].to(device) for name, row in rows.items()}
    chances = Classify([]).logits(model, batch)[0].softmax(-1).tolist()
    order = sorted(range(len(chances)), key=lambda number: -chances[number])
    return "\n".join(f"{names[number]}  {chances[number]:.4f}" for number in order)
