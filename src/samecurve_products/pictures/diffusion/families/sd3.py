"""Stable Diffusion 3: a transformer that sees captions through two CLIPs and a T5."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from samecurve_products.pictures.diffusion.families.base import Conditions, Family
from samecurve_products.pictures.diffusion.families.loading import build_denoiser
from samecurve_products.pictures.diffusion.families.schedule import dynamic_shift
from samecurve_products.pictures.diffusion.families.text_side import device_of, text_side


class StableDiffusion3(Family):
    """Stable Diffusion 3 and 3.5. Where a pipeline has no T5, zeros stand for what it would say."""

    guidance: ClassVar[float] = 7.0
    longest_caption: ClassVar[int | None] = 256  # of T5, as the library's pipeline has it

    def encode_captions(self, parts: Mapping[str, Any], captions: Sequence[str]) -> Conditions:
        others: dict[str, Any] = {}
        if "text_encoder_3" not in self.opened.encoders:  # zeros as wide as the denoiser expects
            with torch.device("meta"):
                others["transformer"] = build_denoiser(self.opened)
        pipeline = text_side(self.opened, parts, **others)
        with torch.no_grad():
            embeddings, _, pooled, _ = pipeline.encode_prompt(
                list(captions),
                None,
                None,
                device=device_of(self.opened, parts),
                do_classifier_free_guidance=False,
                max_sequence_length=self.longest_caption,
            )
        return {"embeddings": embeddings, "pooled": pooled}

    def predict(
        self, model: nn.Module, noisy: Tensor, time: Tensor, conditions: Mapping[str, Tensor]
    ) -> Tensor:
        answer: Tensor = model(
            hidden_states=noisy,
            timestep=(time.double() * self.schedule.steps).float(),
            encoder_hidden_states=conditions["embeddings"].to(noisy.dtype),
            pooled_projections=conditions["pooled"].to(noisy.dtype),
            return_dict=False,
        )[0]
        return answer

    def set_times(self, scheduler: Any, steps: int, tokens: int) -> None:
        shift = {}
        if scheduler.config.use_dynamic_shifting:
            shift["mu"] = dynamic_shift(scheduler, highest=1.16).line(tokens)
        scheduler.set_timesteps(steps, **shift)
