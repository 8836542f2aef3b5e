"""What a pipeline's scheduler says of training: how much noise a time step has.

A flow's times are shifted towards noise. Some schedulers shift larger pictures more.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from samecurve.seam import UserError
from samecurve_products.pictures.diffusion.families.opened import WHERE, OpenedPipeline


@dataclass(frozen=True)
class DynamicShift:
    """A shift that grows with the number of a picture's tokens, between two points of a line."""

    tokens: tuple[int, int]
    values: tuple[float, float]
    is_exponential: bool  # the shift is e to the power of the line's value, or the value itself

    def line(self, tokens: int) -> float:
        """The value that the library calls mu."""
        (first, last), (low, high) = self.tokens, self.values
        slope = (high - low) / (last - first)
        return tokens * slope + (low - slope * first)

    def shift(self, tokens: int) -> float:
        """The factor of shift*t / (1 + (shift - 1)*t)."""
        value = self.line(tokens)
        return math.exp(value) if self.is_exponential else value


def dynamic_shift(scheduler: Any, highest: float = 1.15) -> DynamicShift:
    """The line of a scheduler's config.

    highest: its value for the largest pictures, where the config has none
    """
    config = scheduler.config
    return DynamicShift(
        (config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)),
        (config.get("base_shift", 0.5), config.get("max_shift", highest)),
        config.get("time_shift_type", "exponential") == "exponential",
    )


@dataclass(frozen=True)
class Schedule:
    """How a denoiser was trained.

    steps: of epsilon and v, the number of time steps
    alphas_cumprod: of epsilon and v, the share of the picture's variance at each time step
    """

    prediction: Literal["epsilon", "v", "flow"]
    steps: int
    alphas_cumprod: NDArray[np.float64] | None = None
    constant_shift: float = 1.0
    dynamic_shift: DynamicShift | None = None

    def shift(self, tokens: int) -> float:
        """The shift of a flow's times for a picture of so many tokens: 1 changes nothing."""
        if self.dynamic_shift is not None:
            return self.dynamic_shift.shift(tokens)
        return self.constant_shift


def read_schedule(opened: OpenedPipeline, scheduler: Any) -> Schedule:
    """The schedule of a pipeline. UserError: its scheduler has none that can be trained on.

    scheduler: the library's object
    """
    prediction, config = opened.prediction, scheduler.config
    steps = int(config.num_train_timesteps)
    if prediction == "flow":
        dynamic = dynamic_shift(scheduler) if config.get("use_dynamic_shifting") else None
        return Schedule(prediction, steps, None, float(config.get("shift", 1.0)), dynamic)
    if not hasattr(scheduler, "alphas_cumprod"):
        raise UserError(
            f"{opened.place}: its scheduler, {type(scheduler).__name__}, has no alphas_cumprod",
            "a scheduler such as DDIMScheduler in scheduler/scheduler_config.json",
            WHERE,
        )
    alphas = np.asarray(scheduler.alphas_cumprod.double().cpu().numpy())
    return Schedule(prediction, steps, alphas)
