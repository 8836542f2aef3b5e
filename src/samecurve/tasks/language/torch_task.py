"""The language task with PyTorch."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from samecurve.core.config.sections import Config
from samecurve.core.determinism.mean import Mean
from samecurve.core.protocols import Arrays, StoredArrays
from samecurve.data.tokens import IGNORED
from samecurve.tasks.language.fields import LanguageData, LanguageModel
from samecurve.tasks.language.task import LanguageTask, Logits, generate, speaker
from samecurve.tasks.language.torch_model import Decoder
from samecurve.torch_engine.model import cast_weights
from samecurve.torch_engine.weights import load_weights


class TorchLanguage(LanguageTask):
    def model(self) -> Decoder:
        return Decoder(self.fields, self.vocab)

    def loss(self, model: Any, batch: Arrays) -> Mean:
        return Mean(model(batch["tokens"], batch["labels"]), (batch["labels"] != IGNORED).sum())

    def evaluate(self, model: Any, batch: Arrays) -> Mapping[str, Any]:
        loss, correct = model(batch["tokens"], batch["labels"], score=True)
        return {"loss_sum": loss, "correct": correct, "tokens": (batch["labels"] != IGNORED).sum()}

    def sample(self, model: Any, seed: int) -> list[str]:
        return self.continued(_logits(model), seed)


def _logits(model: Any) -> Logits:
    device = next(model.parameters()).device

    @torch.no_grad()
    def logits(ids: list[int]) -> NDArray[np.float64]:
        found: NDArray[np.float64] = (
            model(torch.tensor([ids], dtype=torch.int64, device=device))[0, -1]
            .double()
            .cpu()
            .numpy()
        )
        return found

    return logits


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return model.state_dict()


def load_model(config: Config, cache: str, weights: StoredArrays) -> nn.Module:
    """The decoder with these weights, whichever engine trained them."""
    assert isinstance(config.model, LanguageModel)
    return load_weights(
        cast_weights(
            Decoder(config.model, weights["embed_tokens.weight"].shape[0]), config.train.precision
        ),
        weights,
    )


def speaking(config: Config, assets: Path) -> Callable[[Any, str, int, float, int], str]:
    """How a model continues a prompt (model, prompt, tokens, temperature, seed)."""
    fields = config.model
    assert isinstance(fields, LanguageModel)
    tokenizer = speaker(config, assets)

    def speak(model: Any, prompt: str, tokens: int, temperature: float, seed: int) -> str:
        return generate(
            _logits(model), tokenizer, prompt, tokens, temperature, seed, fields.max_seq_len
        )

    return speak


def open_task(config: Config, cache: str) -> TorchLanguage:
    assert isinstance(config.model, LanguageModel)
    assert isinstance(config.data, LanguageData)
    return TorchLanguage(config.model, config.data, Path(cache))
