"""The objective of a masked language model: predict hidden tokens from both sides of the text.

The hidden tokens follow from (seed, epoch, sample, place in the text) alone: the same on any
devices and in any microbatch, new in each epoch, and the same in every evaluation.
Source of the shares: Devlin et al. 2019, arXiv:1810.04805, section 3.1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samecurve.seam import Arrays, Mean, SampleNumbers, UserError, rng
from samecurve.torch_engine.model.cross_entropy import IGNORED
from samecurve_products.task_parts.on_device import on_device
from samecurve_products.text.huggingface.causal import (
    count_correct,
    count_labels,
    suit_experts,
    token_errors,
)
from samecurve_products.text.huggingface.data.text_tokenizer import TextTokenizer

_MASK_BELOW, _RANDOM_BELOW = 0.8, 0.9  # 80 % become the mask, 10 % random, 10 % stay


@dataclass(frozen=True)
class Masking:
    """How tokens are hidden.

    probability: that a token is hidden. mask: the id that replaces a hidden token. special: ids
    that are never hidden. vocab_size: random ids are below it.
    """

    probability: float
    mask: int
    special: Sequence[int]
    vocab_size: int

    def hide(self, tokens: Tensor, real: Tensor, numbers: SampleNumbers) -> tuple[Tensor, Tensor]:
        """Returns the tokens that the model sees, and labels: IGNORED where nothing is hidden.

        tokens, real (no padding): [rows, width]. At least one token of each row is hidden, if the
        row has a token that may be.
        """
        width = tokens.shape[1]
        draws, kinds = numbers.uniform(width), numbers.uniform(width)
        others = numbers.integers(0, self.vocab_size, width)
        special = on_device(torch.tensor(self.special, dtype=tokens.dtype), tokens.device)
        may_be = real & ~torch.isin(tokens, special)
        draws = torch.where(may_be, draws, 2.0)
        least = draws.amin(1, keepdim=True)
        hidden = may_be & ((draws < self.probability) | (draws == least))
        shown = torch.where(kinds < _RANDOM_BELOW, others.to(tokens.dtype), tokens)
        shown = torch.where(kinds < _MASK_BELOW, self.mask, shown)
        return torch.where(hidden, shown, tokens), torch.where(hidden, tokens, IGNORED)


def make_masking(probability: float, tokenizer: TextTokenizer | None, vocab_size: int) -> Masking:
    """The masking for a tokenizer; None: random tokens, whose last id stands for the mask.

    UserError: the tokenizer has no mask token.
    """
    if tokenizer is None:
        return Masking(probability, vocab_size - 1, (vocab_size - 1,), vocab_size)
    if tokenizer.mask is None:
        raise UserError(
            f"model.objective masked: the tokenizer {tokenizer.notes.name} has no mask token",
            "the tokenizer of a model that was trained so (bert, roberta, modernbert), with a"
            " mask_token in its tokenizer_config.json; or data.tokenizer=bpe:8000, which gets one",
            "data.tokenizer",
        )
    return Masking(probability, tokenizer.mask, tokenizer.special, tokenizer.size)


class Masked:
    """Loss and metrics of a microbatch. Each row is one text."""

    metric_names = ("loss", "accuracy")

    def __init__(self, masking: Masking) -> None:
        self._masking = masking

    def loss(self, model: Any, batch: Arrays) -> Mean:
        logits, labels = self._answers(model, batch)
        return Mean(token_errors(logits, labels).sum(), count_labels(labels))

    def metrics(self, model: Any, batch: Arrays) -> Mapping[str, Mean]:
        """Loss and accuracy of the hidden tokens."""
        logits, labels = self._answers(model, batch)
        count = count_labels(labels)
        return {
            "loss": Mean(token_errors(logits, labels).sum(), count),
            "accuracy": Mean(count_correct(logits, labels), count),
        }

    def labels(self, batch: Arrays) -> Tensor:
        """The hidden tokens of a microbatch: [rows, width], IGNORED where nothing is hidden."""
        return self._masking.hide(batch["input_ids"], batch["documents"] > 0, rng(batch))[1]

    def _answers(self, model: Any, batch: Arrays) -> tuple[Tensor, Tensor]:
        """Logits [rows, width, vocabulary], and labels [rows, width]."""
        suit_experts(model)
        real = batch["documents"] > 0
        tokens, labels = self._masking.hide(batch["input_ids"], real, rng(batch))
        return model(input_ids=tokens, attention_mask=real.long()).logits, labels
