"""The objective of a causal language model: the next token of the same document.

A label counts if it belongs to the same document as the token before it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samecurve.seam import Arrays, Mean
from samecurve.torch_engine.model.cross_entropy import IGNORED, Head


class LossHead(Head):
    """The model's last layer. While it is passing, it returns its input, for a loss outside."""

    passes = False

    def forward(self, input: Tensor, *_others: Any, **_named: Any) -> Any:  # noqa: A002
        return input if self.passes else nn.Linear.forward(self, input)

    @contextmanager
    def passing(self) -> Iterator[None]:
        self.passes = True
        try:
            yield
        finally:
            self.passes = False

    def loss(self, hidden: Tensor, labels: Tensor, *, score: bool) -> Any:
        """The loss from hidden states and labels, with the arguments of Head's forward pass."""
        return Head.forward(self, hidden, labels, score=score)


def with_loss_head(model: Any) -> Any:
    """The model with a LossHead in place of its plain last layer; the weight stays the same."""
    head = model.get_output_embeddings()
    with torch.device("meta"):
        replaced = LossHead(head.in_features, head.out_features)
    replaced.weight = head.weight
    model.set_output_embeddings(replaced)
    return model


class Causal:
    """Loss and metrics of a microbatch.

    packed: rows may hold several documents, which do not see each other
    """

    metric_names = ("loss", "accuracy")

    def __init__(self, *, packed: bool) -> None:
        self._packed = packed

    def loss(self, model: Any, batch: Arrays) -> Mean:
        labels = next_labels(batch)
        return Mean(self._summed_error(model, batch, labels), count_labels(labels))

    def metrics(self, model: Any, batch: Arrays) -> Mapping[str, Mean]:
        labels = next_labels(batch)
        count = count_labels(labels)
        error, correct = self._summed_error(model, batch, labels, score=True)
        return {"loss": Mean(error, count), "accuracy": Mean(correct, count)}

    def call(self, model: Any, batch: Arrays, **options: Any) -> Any:
        """The library's forward pass, without a cache.

        Rows of one document need no mask: attention is causal, and padding stands at the end.
        """
        if self._packed:  # position 0 begins a new document for the library
            options["position_ids"] = batch["positions"]
        suit_experts(model)
        return model(input_ids=batch["input_ids"], use_cache=False, **options)

    def _summed_error(
        self, model: Any, batch: Arrays, labels: Tensor, *, score: bool = False
    ) -> Any:
        head = model.get_output_embeddings()
        if isinstance(head, LossHead):
            with head.passing():
                hidden = self.call(model, batch).logits
            return head.loss(hidden, labels, score=score)
        logits = self.call(model, batch).logits
        error = token_errors(logits, labels).sum()
        return (error, count_correct(logits, labels)) if score else error


def next_labels(batch: Arrays) -> Tensor:
    """The label to predict at each token: [rows, width], IGNORED where there is none."""
    labels, documents = batch["labels"], batch["documents"]
    same = (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] > 0)
    following = torch.where(same, labels[:, 1:], IGNORED)
    return F.pad(following, (0, 1), value=IGNORED)


def count_labels(labels: Tensor) -> Tensor:
    return (labels != IGNORED).sum()


def token_errors(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross-entropy of each token: [rows, width], at least float32."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    errors = F.cross_entropy(
        wide.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return errors.view_as(labels)


def count_correct(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.argmax(-1) == labels).sum()  # no token has the number IGNORED


def suit_experts(model: Any) -> None:
    """Run experts one after the other on a CPU and in f64: there are no grouped kernels for them.

    Elsewhere the library's choice stays.
    """
    weight = model.get_input_embeddings().weight
    if weight.device.type == "cpu" or weight.dtype == torch.float64:
        config = model.config
        if config._experts_implementation != "eager":  # noqa: SLF001 - no public name sets it later
            config._experts_implementation = "eager"  # noqa: SLF001
