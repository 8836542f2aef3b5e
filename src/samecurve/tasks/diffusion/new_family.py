"""How a new model of pixels is trained and sampled: the same questions as for a pipeline's family.

Its conditions are the words of a caption, and its latents are the pixels themselves.
"""

from typing import Any

import torch
from torch import Tensor

from samecurve.tasks.diffusion.objective import Denoising, Flow, Objective
from samecurve.tasks.diffusion.sampling import denoise
from samecurve.tasks.diffusion.sections import DiffusionModel
from samecurve.tasks.diffusion.words import Words

_TRAINED = 1000.0  # time steps of a new model's scheduler; the model takes times from 0 to 1


def new_scheduler(fields: DiffusionModel) -> Any:
    """The scheduler of diffusers by which a new model is sampled."""
    if fields.prediction in {"auto", "flow"}:
        from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
            FlowMatchEulerDiscreteScheduler,
        )

        return FlowMatchEulerDiscreteScheduler(shift=fields.time_steps.shift or 1.0)
    from diffusers.schedulers.scheduling_ddim import DDIMScheduler

    kind = "epsilon" if fields.prediction == "epsilon" else "v_prediction"
    return DDIMScheduler(
        prediction_type=kind,
        clip_sample=True,
        rescale_betas_zero_snr=fields.prediction == "v",
        timestep_spacing="trailing",
    )


def new_objective(fields: DiffusionModel) -> Objective:
    """What a new model learns; the noise levels are those of its scheduler."""
    if fields.prediction in {"auto", "flow"}:
        return Flow(fields.time_steps)
    alphas = new_scheduler(fields).alphas_cumprod.double().tolist()
    prediction = "epsilon" if fields.prediction == "epsilon" else "v"
    return Denoising(alphas, prediction, fields.min_snr)


def predict_pixels(model: Any, noisy: Tensor, time: Tensor, words: Tensor) -> Tensor:
    """What a new model says of noisy pixels.

    time: from 0 to 1, or whole time steps of its scheduler
    """
    fraction = time if time.is_floating_point() else time / _TRAINED
    said: Tensor = model(noisy, fraction, words)
    return said


def sample_pixels(
    model: Any,
    fields: DiffusionModel,
    words: Words,
    prompts: tuple[str, str],
    noise: Tensor,
    *,
    steps: int,
    guidance: float,
) -> Tensor:
    """Pixels [3, height, width] of one prompt.

    prompts: the prompt, and what the picture is led away from
    noise: [1, 3, height, width]
    """
    parameter = next(model.parameters())
    encoded = torch.from_numpy(words.encode(prompts)).to(parameter.device)
    flow = fields.prediction in {"auto", "flow"}
    start = noise.to(parameter.device, parameter.dtype)

    def guided(noisy: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        both, at = torch.cat([noisy, noisy]), torch.cat([time, time])
        said = predict_pixels(model, both, at, encoded)
        return said[:1], said[1:]

    scheduler = new_scheduler(fields)
    return denoise(scheduler, start, guided, steps=steps, guidance=guidance, flow=flow)[0]
