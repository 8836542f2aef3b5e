"""Stable Diffusion 1 and 2, and SDXL: a UNet that sees captions by cross attention."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from samecurve_products.pictures.diffusion.families.base import Conditions, Family
from samecurve_products.pictures.diffusion.families.text_side import device_of, text_side


class StableDiffusion(Family):
    """Stable Diffusion 1 and 2: one text encoder, whose last layer is used."""

    guidance: ClassVar[float] = 7.5

    def scheduler(self) -> Any:
        """The scheduler, with what the library's pipeline corrects in old configs."""
        scheduler = super().scheduler()
        corrected = {
            name: value
            for name, value in (("steps_offset", 1), ("clip_sample", False))
            if scheduler.config.get(name, value) != value
        }
        return type(scheduler).from_config(scheduler.config, **corrected)

    def encode_captions(self, parts: Mapping[str, Any], captions: Sequence[str]) -> Conditions:
        pipeline = text_side(self.opened, parts, requires_safety_checker=False)
        with torch.no_grad():
            embeddings, _ = pipeline.encode_prompt(
                list(captions),
                device_of(self.opened, parts),
                num_images_per_prompt=1,
                do_classifier_free_guidance=False,
            )
        return {"embeddings": embeddings}

    def predict(
        self, model: nn.Module, noisy: Tensor, time: Tensor, conditions: Mapping[str, Tensor]
    ) -> Tensor:
        answer: Tensor = model(
            noisy,
            time,
            encoder_hidden_states=conditions["embeddings"].to(noisy.dtype),
            return_dict=False,
        )[0]
        return answer


class Sdxl(Family):
    """SDXL: two text encoders, and the picture's size and crop as further conditions."""

    guidance: ClassVar[float] = 5.0

    def encode_captions(self, parts: Mapping[str, Any], captions: Sequence[str]) -> Conditions:
        pipeline = text_side(self.opened, parts, add_watermarker=False)
        with torch.no_grad():
            embeddings, _, pooled, _ = pipeline.encode_prompt(
                list(captions),
                device=device_of(self.opened, parts),
                do_classifier_free_guidance=False,
            )
        return {"embeddings": embeddings, "pooled": pooled}

    def encode_negative(self, parts: Mapping[str, Any], caption: str) -> Conditions:
        encoded = self.encode_captions(parts, [caption])
        if caption or not self.opened.settings.get("force_zeros_for_empty_prompt", True):
            return encoded
        return {name: torch.zeros_like(values) for name, values in encoded.items()}

    def size_conditions(
        self, *, original: tuple[int, int], corner: tuple[int, int], size: tuple[int, int]
    ) -> dict[str, tuple[float, ...]]:
        return {"time_ids": (*original, *corner, *size)}

    def predict(
        self, model: nn.Module, noisy: Tensor, time: Tensor, conditions: Mapping[str, Tensor]
    ) -> Tensor:
        answer: Tensor = model(
            noisy,
            time,
            encoder_hidden_states=conditions["embeddings"].to(noisy.dtype),
            added_cond_kwargs={
                "text_embeds": conditions["pooled"].to(noisy.dtype),
                "time_ids": conditions["time_ids"],
            },
            return_dict=False,
        )[0]
        return answer
