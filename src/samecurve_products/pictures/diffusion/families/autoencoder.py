"""Pictures to latents and back, with the scales that a pipeline's denoiser is trained on."""

from typing import Any

import torch
from torch import Tensor


def encode(vae: Any, pixels: Tensor) -> Tensor:
    """Moments of scaled latents: mean and deviation, [n, 2, channels, height, width].

    pixels: [n, 3, height, width], from -1 to 1
    """
    with torch.no_grad():
        encoded = vae.encode(pixels.to(vae.device, vae.dtype))
    if hasattr(encoded, "latent_dist"):
        mean, deviation = encoded.latent_dist.mean, encoded.latent_dist.std
    else:  # it gives one value a place
        mean, deviation = encoded.latents, torch.zeros_like(encoded.latents)
    shift, scale = _shift_and_scale(vae, mean)
    return torch.stack([(mean - shift) * scale, deviation * scale], dim=1)


def decode(vae: Any, latents: Tensor) -> Tensor:
    """Pixels of scaled latents: [n, 3, height, width], about from -1 to 1."""
    latents = latents.to(vae.device, vae.dtype)
    shift, scale = _shift_and_scale(vae, latents)
    with torch.no_grad():
        pixels: Tensor = vae.decode(latents / scale + shift, return_dict=False)[0]
    return pixels


def _shift_and_scale(vae: Any, like: Tensor) -> tuple[Tensor | float, Tensor | float]:
    """What is taken from a VAE's latents, and what they are multiplied with then."""
    config = vae.config
    scale: float = config.scaling_factor
    means, deviations = config.get("latents_mean"), config.get("latents_std")
    if means is not None and deviations is not None:  # one for each channel
        shape = (1, -1, 1, 1)
        return (
            like.new_tensor(means).view(shape),
            scale / like.new_tensor(deviations).view(shape),
        )
    return config.get("shift_factor") or 0.0, scale
