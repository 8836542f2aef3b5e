"""Tiny models of libraries as they come, with their own dropout: encoders, decoders, vision,
recurrent ones, mixtures of experts without balance.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samecurve import Mean

TEXT = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
ENCODER = {**TEXT, "intermediate_size": 24, "max_position_embeddings": 12}
DECODER = {**ENCODER, "num_key_value_heads": 1, "pad_token_id": 0}
PICTURE = {"image_size": 16, "patch_size": 4, "num_channels": 3, "num_labels": 3}
DROP_PATH = {"drop_path_rate": 0.3}
SWIN = {"embed_dim": 8, "depths": [2], "num_heads": [2], "window_size": 2, **DROP_PATH}
PYRAMID = {"num_channels": 3, "num_labels": 3, "hidden_sizes": [8, 16], "depths": [1, 1]}
MODELS: dict[str, Callable[[], nn.Module]] = {}


def model(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    MODELS[build.__name__] = build
    return build


def hugging(kind: str, head: str, **fields: Any) -> None:
    """A model of transformers by its config's class and its own."""

    def build() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{kind}Config")(**fields)
        config._experts_implementation = "eager"  # grouped products know no float64
        built: nn.Module = getattr(transformers, f"{kind}{head}")(config)
        return built

    MODELS[kind] = build


hugging("Bert", "ForSequenceClassification", **ENCODER, num_labels=3)
hugging("Roberta", "ForMaskedLM", **{**ENCODER, "max_position_embeddings": 16})
hugging("Electra", "ForMaskedLM", **ENCODER, embedding_size=8)
hugging("Albert", "ForMaskedLM", **ENCODER, embedding_size=8)
hugging("DistilBert", "ForMaskedLM", vocab_size=50, dim=16, n_layers=2, n_heads=2, hidden_dim=24)
hugging("GPT2", "LMHeadModel", vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=12)
hugging("GPTNeoX", "ForCausalLM", **ENCODER, attention_dropout=0.1, hidden_dropout=0.1)
hugging(
    "OPT", "ForCausalLM", **TEXT, ffn_dim=24, max_position_embeddings=12, word_embed_proj_dim=16
)
hugging("Llama", "ForCausalLM", **DECODER, attention_dropout=0.1)
hugging("Qwen2", "ForCausalLM", **DECODER)
hugging("Mistral", "ForCausalLM", **DECODER, sliding_window=4)
hugging("Mixtral", "ForCausalLM", **DECODER, num_local_experts=4)
hugging("Bloom", "ForCausalLM", vocab_size=50, hidden_size=16, n_layer=2, n_head=2)
hugging("ViT", "ForImageClassification", **{**ENCODER, **PICTURE})
hugging("Swin", "ForImageClassification", **PICTURE, **SWIN)
hugging("ConvNext", "ForImageClassification", **PYRAMID, num_stages=2, patch_size=2, **DROP_PATH)
hugging("ResNet", "ForImageClassification", **PYRAMID, embedding_size=8)


class Classifier(nn.Module):
    """Of tokens, by a body over [samples, tokens, 16]."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(50, 16), body, nn.Linear(16, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        result = self.body(self.embedding(tokens))
        values = result[0] if isinstance(result, tuple) else result
        logits: Tensor = self.head(values.mean(1))
        return logits


class Experts(nn.Module):
    """Each token goes to the two experts that its router likes best."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        output = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            weight = (weights * (chosen == number)).sum(-1, keepdim=True)
            output = output + weight * expert(x)
        return output


@model
def torch_encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.1, batch_first=True)
    return Classifier(nn.TransformerEncoder(layer, 2))


@model
def lstm() -> nn.Module:
    return Classifier(nn.LSTM(16, 16, 2, dropout=0.2, batch_first=True))


@model
def gru() -> nn.Module:
    return Classifier(nn.GRU(16, 8, 2, dropout=0.2, batch_first=True, bidirectional=True))


@model
def experts() -> nn.Module:
    return Classifier(nn.Sequential(Experts(), nn.Dropout(0.1), Experts()))


@model
def spectral() -> nn.Module:
    return Classifier(nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)))


@model
def convolutions() -> nn.Module:
    blocks: list[nn.Module] = []
    for channels in (3, 8):
        blocks += [
            nn.Conv2d(channels, 8, 3, 2, 1),
            nn.GroupNorm(2, 8),
            nn.GELU(),
            nn.Dropout2d(0.1),
        ]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(8 * 16, 3))


PICTURES = {"ViT", "Swin", "ConvNext", "ResNet", "convolutions"}
CLASSES = PICTURES | {"Bert", "torch_encoder", "lstm", "gru", "experts", "spectral"}


class Rows:
    def __init__(self, name: str) -> None:
        self.pictures = name in PICTURES

    def __len__(self) -> int:
        return 24

    def __getitem__(self, ids: Any) -> dict[str, Any]:
        generators = [np.random.default_rng(int(i)) for i in ids]
        if self.pictures:
            rows = np.stack([g.normal(size=(3, 16, 16)) for g in generators]).astype(np.float32)
        else:
            rows = np.stack([g.integers(3, 50, 8) for g in generators])
        return {"x": rows, "y": ids % 3}


class Library:
    """model.name: which."""

    def __init__(self, model: Mapping[str, Any]) -> None:
        self.name = model["name"]

    def model(self) -> nn.Module:
        return MODELS[self.name]()

    def loss(self, model: Any, batch: Mapping[str, Tensor]) -> Mean:
        x = batch["x"]
        if x.is_floating_point():
            x = x.to(next(model.parameters()).dtype)
        output = model(x)
        logits = getattr(output, "logits", output)
        if self.name in CLASSES:
            return Mean(F.cross_entropy(logits, batch["y"], reduction="sum"), len(x))
        each = F.cross_entropy(logits[:, :-1].mT, x[:, 1:], reduction="sum")
        return Mean(each, x[:, 1:].numel())

    def train_data(self) -> Rows:
        return Rows(self.name)
