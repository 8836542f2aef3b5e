"""The language task with PyTorch."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from samecurve.core.determinism.mean import Mean
from samecurve.core.protocols import Arrays
from samecurve.data.sources import IGNORED
from samecurve.tasks.language.task import LanguageTask, NextLogits
from samecurve.tasks.language.torch_model import Decoder


class TorchLanguage(LanguageTask):
    def model(self) -> Decoder:
        return Decoder(self.fields, self.vocab)

    def loss(self, model: Any, batch: Arrays) -> Mean:
        return Mean(model(batch["tokens"], batch["labels"]), _count(batch))

    def metrics(self, model: Any, batch: Arrays) -> Mapping[str, Mean]:
        loss, correct = model(batch["tokens"], batch["labels"], score=True)
        return {"loss": Mean(loss, _count(batch)), "accuracy": Mean(correct, _count(batch))}

    def next_logits(self, model: Any) -> NextLogits:
        device = next(model.parameters()).device

        @torch.no_grad()
        def logits(ids: list[int]) -> NDArray[np.float64]:
            tokens = torch.tensor([ids], dtype=torch.int64, device=device)
            last: NDArray[np.float64] = model(tokens)[0, -1].double().cpu().numpy()
            return last

        return logits


def _count(batch: Arrays) -> Any:
    """How many tokens have a label."""
    return (batch["labels"] != IGNORED).sum()
