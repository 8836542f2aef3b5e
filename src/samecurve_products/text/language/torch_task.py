"""The language task with PyTorch, and its model: a Llama-style decoder with RMSNorm, rotary
positions, grouped-query attention and SwiGLU.

Names and layouts are those of Hugging Face's Llama. No operation has a fixed number format, so a
float64 model computes in float64 throughout.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from samecurve.seam import IGNORED, Arrays, Mean
from samecurve.torch_engine.model.cross_entropy import Head
from samecurve_products.text.language import LanguageModel
from samecurve_products.text.language.task import LanguageTask, NextLogits


def rotary(length: int, head_size: int, theta: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [length, head_size] of position times theta^(-2i/d).

    The two halves of a head are rotated against each other.
    """
    evens = torch.arange(0, head_size, 2, dtype=torch.float64, device=like.device)
    rates = theta ** (-evens / head_size)
    angles = torch.arange(length, dtype=torch.float64, device=like.device)[:, None] * rates
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Apply rotary positions to queries and keys [batch, heads, length, head_size]."""
    first_q, second_q = q.chunk(2, dim=-1)
    first_k, second_k = k.chunk(2, dim=-1)
    q = q * cos + torch.cat([-second_q, first_q], dim=-1) * sin
    return q, k * cos + torch.cat([-second_k, first_k], dim=-1) * sin


def takes_groups(query: Tensor) -> bool:
    """Whether torch's fused attention takes fewer heads of keys than of queries. On GPUs it does in
    two bytes only: in f32 torch would keep the scores for the backward pass.
    """
    return not query.is_cuda or query.dtype in {torch.bfloat16, torch.float16}


class Attention(nn.Module):
    def __init__(self, fields: LanguageModel) -> None:
        super().__init__()
        self.heads, self.groups, self.size = fields.num_heads, fields.groups, fields.head_size
        self.q_proj = nn.Linear(fields.hidden_size, self.heads * self.size, bias=False)
        self.k_proj = nn.Linear(fields.hidden_size, self.groups * self.size, bias=False)
        self.v_proj = nn.Linear(fields.hidden_size, self.groups * self.size, bias=False)
        self.o_proj = nn.Linear(self.heads * self.size, fields.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, self.groups, self.size).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self.groups, self.size).transpose(1, 2)
        q, k = rotate(q, k, cos, sin)
        q, k = q.to(v.dtype), k.to(v.dtype)
        grouped = self.groups != self.heads
        if grouped and not takes_groups(q):
            k, v = (of.repeat_interleave(self.heads // self.groups, dim=1) for of in (k, v))
            grouped = False
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        out: Tensor = self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))
        return out


class FeedForward(nn.Module):
    def __init__(self, fields: LanguageModel) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(fields.hidden_size, fields.inner, bias=False)
        self.up_proj = nn.Linear(fields.hidden_size, fields.inner, bias=False)
        self.down_proj = nn.Linear(fields.inner, fields.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    def __init__(self, fields: LanguageModel) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(fields.hidden_size, eps=fields.norm_eps)
        self.self_attn = Attention(fields)
        self.post_attention_layernorm = nn.RMSNorm(fields.hidden_size, eps=fields.norm_eps)
        self.mlp = FeedForward(fields)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """Tokens [batch, length] -> logits [batch, length, vocab]; with labels, the loss of Head."""

    def __init__(self, fields: LanguageModel, vocab: int) -> None:
        super().__init__()
        self.fields = fields
        self.embed_tokens = nn.Embedding(vocab, fields.hidden_size)
        self.layers = nn.ModuleList(Block(fields) for _ in range(fields.num_layers))
        self.norm = nn.RMSNorm(fields.hidden_size, eps=fields.norm_eps)
        self.lm_head = Head(fields.hidden_size, vocab)
        if fields.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        # kept for the last length: making them takes 0.1 ms on a CPU, ten kernels on a GPU
        self._angles: tuple[Any, tuple[Tensor, Tensor]] | None = None

    def forward(self, tokens: Tensor, labels: Tensor | None = None, *, score: bool = False) -> Any:
        x = self.embed_tokens(tokens)
        cos, sin = self._rotary(x)
        for block in self.layers:
            x = block(x, cos, sin)
        return self.lm_head(self.norm(x), labels, score=score)

    def _rotary(self, x: Tensor) -> tuple[Tensor, Tensor]:
        # tensors made in inference mode can't be used in training
        key = (x.shape[1], x.device, x.dtype, torch.is_inference_mode_enabled())
        if self._angles is None or self._angles[0] != key:
            self._angles = key, rotary(x.shape[1], self.fields.head_size, self.fields.rope_theta, x)
        return self._angles[1]


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
