"""Pictures from noise: the loop over a scheduler's steps, with guidance by a prompt.

A prompt's picture is computed alone, from noise that follows (seed, number of the prompt). So it is
the same whichever rank makes it.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from samecurve.core.determinism.sample_keys import sample_rng

# (noisy, time) -> what the model says, with and without the prompt, one row each
Guided = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def first_noise(seed: int, prompt: int, shape: tuple[int, ...]) -> Tensor:
    """The noise that a prompt's picture begins with, [1, *shape], the same on any device.

    prompt: the number of the prompt
    """
    noise = sample_rng(prompt, seed=seed % 2**63).standard_normal(shape, np.float32)
    return torch.from_numpy(noise)[None]


def denoise(
    scheduler: Any, noise: Tensor, guided: Guided, *, steps: int, guidance: float, flow: bool
) -> Tensor:
    """The picture, or its latents, that the scheduler's steps make of noise.

    scheduler: of diffusers, and deterministic
    guidance: 1: the prompt as it is; more: further away from what is made without it
    flow: the model takes times from 0 to 1; else the scheduler's time steps
    """
    scheduler.set_timesteps(steps, device=noise.device)
    noisy = noise * scheduler.init_noise_sigma if hasattr(scheduler, "init_noise_sigma") else noise
    for time in scheduler.timesteps:
        scaled = noisy
        if hasattr(scheduler, "scale_model_input"):
            scaled = scheduler.scale_model_input(noisy, time)
        at = time / scheduler.config.num_train_timesteps if flow else time
        with_prompt, without = guided(scaled, at.to(noisy.device).expand(len(noisy)))
        answer = with_prompt
        if guidance != 1:
            answer = without + guidance * (with_prompt - without)
        noisy = scheduler.step(answer, time, noisy, return_dict=False)[0]
    return noisy


def as_picture(pixels: Tensor) -> NDArray[np.uint8]:
    """Pixels [3, height, width] from -1 to 1, as a picture [height, width, 3]."""
    levels = ((pixels.float() + 1) * 127.5).round().clamp(0, 255)
    return levels.to(torch.uint8).permute(1, 2, 0).cpu().numpy()
