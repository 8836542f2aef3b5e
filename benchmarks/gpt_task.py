"""A GPT of 10.7M parameters on made-up tokens: 6 layers of 384, sequences of 128, for every trainer
the same.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from samecurve import Mean
from samecurve_products.text.language import LanguageModel
from samecurve_products.text.language.torch_task import Decoder

VOCAB, LENGTH, SAMPLES = 256, 128, 4096
FIELDS = LanguageModel.model_validate(
    {
        "hidden_size": 384,
        "num_layers": 6,
        "num_heads": 6,
        "kv_heads": 6,
        "intermediate_size": 1024,
        "max_seq_len": LENGTH,
    }
)


class Rows:
    def __init__(self) -> None:
        self.tokens = np.random.default_rng(0).integers(0, VOCAB, (SAMPLES, LENGTH + 1))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, ids: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
        rows = self.tokens[ids]
        return {"tokens": rows[:, :-1], "labels": rows[:, 1:]}


def loss_of(model: Any, tokens: torch.Tensor, labels: torch.Tensor, reduction: str) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction=reduction)


class Gpt:
    def model(self) -> nn.Module:
        return Decoder(FIELDS, VOCAB)

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> Mean:
        return Mean(
            loss_of(model, batch["tokens"], batch["labels"], "sum"), batch["labels"].numel()
        )

    def train_data(self) -> Rows:
        return Rows()
