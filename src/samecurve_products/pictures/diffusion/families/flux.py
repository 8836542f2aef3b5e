"""FLUX.1: a transformer over patches of latents, which takes the guidance as an input."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from samecurve_products.pictures.diffusion.families.base import Conditions, Family
from samecurve_products.pictures.diffusion.families.schedule import dynamic_shift
from samecurve_products.pictures.diffusion.families.text_side import device_of, text_side


class Flux(Family):
    """FLUX.1. Its pictures are not led away from a negative: the guidance is the denoiser's own."""

    guidance: ClassVar[float] = 3.5
    longest_caption: ClassVar[int | None] = 512  # of T5, as the library's pipeline has it

    def encode_captions(self, parts: Mapping[str, Any], captions: Sequence[str]) -> Conditions:
        pipeline = text_side(self.opened, parts)
        with torch.no_grad():
            embeddings, pooled, _ = pipeline.encode_prompt(
                list(captions),
                device=device_of(self.opened, parts),
                max_sequence_length=self.longest_caption,
            )
        return {"embeddings": embeddings, "pooled": pooled}

    def is_guided(self, guidance: float) -> bool:
        del guidance
        return False

    def with_guidance(self, conditions: Conditions, guidance: float) -> Conditions:
        if not self.opened.denoiser.config.get("guidance_embeds"):
            return conditions
        pooled = conditions["pooled"]
        rows = torch.full((len(pooled),), guidance, dtype=torch.float32, device=pooled.device)
        return {**conditions, "guidance": rows}

    def predict(
        self, model: nn.Module, noisy: Tensor, time: Tensor, conditions: Mapping[str, Tensor]
    ) -> Tensor:
        embeddings = conditions["embeddings"].to(noisy.dtype)
        answer = model(
            hidden_states=pack(noisy),
            timestep=time.to(noisy.dtype),
            guidance=conditions.get("guidance"),
            pooled_projections=conditions["pooled"].to(noisy.dtype),
            encoder_hidden_states=embeddings,
            txt_ids=noisy.new_zeros(embeddings.shape[1], 3),
            img_ids=_places(noisy),
            return_dict=False,
        )[0]
        return unpack(answer, noisy)

    def set_times(self, scheduler: Any, steps: int, tokens: int) -> None:
        times = np.linspace(1.0, 1 / steps, steps)
        scheduler.set_timesteps(sigmas=times, mu=dynamic_shift(scheduler).line(tokens))


def pack(latents: Tensor) -> Tensor:
    """Patches of two by two places as tokens: [n, height/2 * width/2, 4 * channels]."""
    rows, channels, height, width = latents.shape
    patches = latents.reshape(rows, channels, height // 2, 2, width // 2, 2)
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(rows, -1, 4 * channels)


def unpack(tokens: Tensor, like: Tensor) -> Tensor:
    """The latents that pack() makes tokens of. like: latents of their shape"""
    rows, channels, height, width = like.shape
    patches = tokens.reshape(rows, height // 2, width // 2, channels, 2, 2)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(like.shape)


def _places(latents: Tensor) -> Tensor:
    """Where each token lies: zero, row, column."""
    height, width = (side // 2 for side in latents.shape[-2:])
    rows, columns = torch.meshgrid(
        torch.arange(height, device=latents.device),
        torch.arange(width, device=latents.device),
        indexing="ij",
    )
    places = torch.stack([torch.zeros_like(rows), rows, columns], dim=-1)
    return places.reshape(-1, 3).to(latents.dtype)
