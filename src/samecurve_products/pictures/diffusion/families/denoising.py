"""Pictures from noise, with a pipeline's own scheduler. The same noise gives the same picture."""

import hashlib
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from samecurve_products.pictures.diffusion.families.base import Conditions, Family


@torch.no_grad()
def sample(
    family: Family,
    parts: Mapping[str, Any],
    model: nn.Module,
    noise: Tensor,
    *,
    conditions: Conditions,
    negative: Conditions | None,
    steps: int,
    guidance: float | None = None,
) -> Tensor:
    """Pictures of noise: [n, 3, height, width], from -1 to 1.

    noise: [n, *family.latent_shape(height, width)], of deviation 1, in the number format of the
        model and on its device
    conditions, negative: of encode_captions() and encode_negative(), a row for each picture
    guidance: how strongly a prompt is followed; None: as the pipeline's own pictures
    """
    latents = denoise(
        family,
        model,
        noise,
        conditions=conditions,
        negative=negative,
        steps=steps,
        guidance=guidance,
    )
    return family.decode_latents(parts, latents).clamp(-1, 1)


@torch.no_grad()
def denoise(
    family: Family,
    model: nn.Module,
    noise: Tensor,
    *,
    conditions: Conditions,
    negative: Conditions | None,
    steps: int,
    guidance: float | None = None,
) -> Tensor:
    """Scaled latents of noise, as sample() decodes them."""
    guidance = family.guidance if guidance is None else guidance
    factor = family.opened.factor
    height, width = (side * factor for side in noise.shape[-2:])
    told = _told_of_size(family, noise, height, width)
    conditions = {**family.with_guidance(conditions, guidance), **told}
    led_from = None
    if negative is not None and family.is_guided(guidance):
        led_from = {**family.with_guidance(negative, guidance), **told}
    scheduler = family.scheduler()
    family.set_times(scheduler, steps, family.tokens(height, width))
    options = _step_options(scheduler, noise)
    latents = noise * scheduler.init_noise_sigma if _has_sigma(scheduler) else noise
    for t in scheduler.timesteps:
        noisy = latents
        if hasattr(scheduler, "scale_model_input"):
            noisy = scheduler.scale_model_input(latents, t).to(noise.dtype)
        time = _model_time(family, t).to(noise.device).expand(len(noise))
        answer = family.predict(model, noisy, time, conditions)
        if led_from is not None:
            other = family.predict(model, noisy, time, led_from)
            answer = family.guided(answer, other, guidance)
        latents = scheduler.step(answer, t, latents, return_dict=False, **options)[0]
    return latents


def _told_of_size(family: Family, noise: Tensor, height: int, width: int) -> dict[str, Tensor]:
    """Conditions of the size of a picture that is not cropped."""
    size = (height, width)
    numbers = family.size_conditions(original=size, corner=(0, 0), size=size)
    return {
        name: torch.tensor([row] * len(noise), dtype=torch.float32, device=noise.device)
        for name, row in numbers.items()
    }


def _model_time(family: Family, t: Tensor) -> Tensor:
    """A scheduler's time as predict() takes it."""
    if family.schedule.prediction != "flow":
        return t
    return t.double() / family.schedule.steps


def _has_sigma(scheduler: Any) -> bool:
    return hasattr(scheduler, "init_noise_sigma")


def _step_options(scheduler: Any, noise: Tensor) -> dict[str, Any]:
    """The generator of a scheduler that draws new noise in each step: from the first noise."""
    if "generator" not in inspect.signature(scheduler.step).parameters:
        return {}
    values = noise.detach().float().cpu().numpy().tobytes()
    seed = int.from_bytes(hashlib.sha256(values).digest()[:7], "little")
    return {"generator": torch.Generator().manual_seed(seed)}
