"""FLUX.2 klein: patches of latents as channels, and three layers of a language model as caption."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from samecurve_products.pictures.diffusion.families.base import Conditions, Family
from samecurve_products.pictures.diffusion.families.text_side import device_of, templated, text_side


class Flux2Klein(Family):
    """FLUX.2 klein. The distilled one is guided by nothing; its base is."""

    guidance: ClassVar[float] = 4.0
    longest_caption: ClassVar[int | None] = 512  # as the library's pipeline has it

    def encode_captions(self, parts: Mapping[str, Any], captions: Sequence[str]) -> Conditions:
        pipeline = text_side(self.opened, parts)
        with torch.no_grad():
            embeddings, _ = pipeline.encode_prompt(
                list(captions),
                device=device_of(self.opened, parts),
                max_sequence_length=self.longest_caption,
            )
        return {"embeddings": embeddings}

    def caption_outline(self) -> Mapping[str, Any]:
        width = self.opened.denoiser.config["joint_attention_dim"]
        return {"embeddings": (1, self.longest_caption, width)}

    def chat(self, tokenizer: Any, caption: str) -> str:
        return templated(tokenizer, caption, enable_thinking=False)

    def encode_pictures(self, parts: Mapping[str, Any], pixels: Tensor) -> Tensor:
        vae = parts["vae"]
        with torch.no_grad():
            encoded = vae.encode(pixels.to(vae.device, vae.dtype)).latent_dist
        mean, deviation = (pixel_unshuffle(values, 2) for values in (encoded.mean, encoded.std))
        shift, scale = _statistics(vae)
        return torch.stack([(mean - shift) / scale, deviation / scale], dim=1)

    def decode_latents(self, parts: Mapping[str, Any], latents: Tensor) -> Tensor:
        vae = parts["vae"]
        shift, scale = _statistics(vae)
        unscaled = latents.to(vae.device, vae.dtype) * scale + shift
        with torch.no_grad():
            pixels: Tensor = vae.decode(pixel_shuffle(unscaled, 2), return_dict=False)[0]
        return pixels

    def is_guided(self, guidance: float) -> bool:
        return guidance > 1 and not self.opened.settings.get("is_distilled", False)

    def predict(
        self, model: nn.Module, noisy: Tensor, time: Tensor, conditions: Mapping[str, Tensor]
    ) -> Tensor:
        embeddings = conditions["embeddings"].to(noisy.dtype)
        height, width = noisy.shape[-2:]
        words = torch.arange(embeddings.shape[1], device=noisy.device)
        answer: Tensor = model(
            hidden_states=noisy.flatten(2).transpose(1, 2),
            timestep=time.to(noisy.dtype),
            guidance=None,
            encoder_hidden_states=embeddings,
            txt_ids=_places(1, 1, words),
            img_ids=_places(height, width, words[:1]),
            return_dict=False,
        )[0]
        return answer.transpose(1, 2).reshape(noisy.shape)

    def set_times(self, scheduler: Any, steps: int, tokens: int) -> None:
        pipeline: Any = importlib.import_module("diffusers.pipelines.flux2.pipeline_flux2_klein")
        shift = pipeline.compute_empirical_mu(image_seq_len=tokens, num_steps=steps)
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=shift)


def _statistics(vae: Any) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel of patches, over the pictures the VAE was trained on."""
    mean, variance = vae.bn.running_mean, vae.bn.running_var
    deviation = torch.sqrt(variance + vae.config.batch_norm_eps)
    return mean.view(1, -1, 1, 1), deviation.view(1, -1, 1, 1)


def _places(height: int, width: int, words: Tensor) -> Tensor:
    """Where each token lies: zero, row, column, word."""
    rows, columns = (torch.arange(side, device=words.device) for side in (height, width))
    return torch.cartesian_prod(torch.zeros_like(words[:1]), rows, columns, words)
