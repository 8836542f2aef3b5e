"""What a diffusion model learns: noise, a velocity of noise, or a flow from pictures to noise.

Noise and time steps come from samecurve.rng(), so they follow the sample: (seed, epoch, sample).
The validation loss draws the same ones each time, at several times of each picture.

epsilon and v: Ho et al. 2020, arXiv:2006.11239; Salimans and Ho 2022, arXiv:2202.00512.
flow: Lipman et al. 2022, arXiv:2210.02747; Esser et al. 2024, arXiv:2403.03206.
min-SNR weights: Hang et al. 2023, arXiv:2303.09556.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from samecurve.seam import SampleNumbers
from samecurve_products.pictures.diffusion.sections import TimeSteps

EVAL_TIMES = 4  # times of each picture at which a validation loss is measured
Predict = Callable[[Tensor, Tensor], Tensor]  # (noisy, time) -> what the model says


@dataclass(frozen=True)
class Noising:
    """Pictures with noise, and what the model is to say of them."""

    noisy: Tensor
    time: Tensor  # [rows], as the model takes it
    target: Tensor
    weight: Tensor  # [rows], of the time step in the loss


class Flow:
    """Pictures become noise along straight lines; the model gives the direction.

    noisy = (1 - t) * picture + t * noise; the target is noise - picture.
    """

    def __init__(self, times: TimeSteps, shift: float = 1.0) -> None:
        self._times = times
        self._shift = shift if times.shift is None else times.shift

    def times(self, uniform: Tensor) -> Tensor:
        """Times, 0 for a picture and 1 for noise, from numbers spread evenly over [0, 1)."""
        times = uniform
        if self._times.distribution == "logit_normal":
            normal = torch.special.ndtri(uniform.clamp(1e-7, 1 - 1e-7))
            times = torch.sigmoid(normal * self._times.deviation + self._times.mean)
        return self._shift * times / (1 + (self._shift - 1) * times)

    def noised(self, pictures: Tensor, noise: Tensor, times: Tensor) -> Noising:
        t = times.view(-1, *[1] * (pictures.ndim - 1))
        noisy = (1 - t) * pictures + t * noise
        return Noising(noisy, times, noise - pictures, torch.ones_like(times))


class Denoising:
    """Noise of as many levels as the scheduler has; the model gives the noise, or its velocity."""

    def __init__(
        self,
        alphas: Sequence[float],
        prediction: Literal["epsilon", "v"],
        min_snr: float | None = None,
    ) -> None:
        """alphas: share of the picture's variance at each time step (alphas_cumprod)"""
        self._alphas, self._prediction, self._min_snr = tuple(alphas), prediction, min_snr

    def times(self, uniform: Tensor) -> Tensor:
        """Time steps from numbers spread evenly over [0, 1)."""
        return (uniform * len(self._alphas)).long()

    def noised(self, pictures: Tensor, noise: Tensor, times: Tensor) -> Noising:
        table = torch.tensor(self._alphas, dtype=pictures.dtype, device=pictures.device)
        alpha = table[times]
        rows = alpha.view(-1, *[1] * (pictures.ndim - 1))
        signal, spread = rows.sqrt(), (1 - rows).sqrt()
        noisy = signal * pictures + spread * noise
        target = noise if self._prediction == "epsilon" else signal * noise - spread * pictures
        return Noising(noisy, times, target, self._weights(alpha))

    def _weights(self, alpha: Tensor) -> Tensor:
        if self._min_snr is None:
            return torch.ones_like(alpha)
        ratio = alpha / (1 - alpha)
        limited = ratio.clamp(max=self._min_snr)
        return limited / (ratio if self._prediction == "epsilon" else ratio + 1)


Objective = Flow | Denoising


def row_losses(
    objective: Objective,
    predict: Predict,
    pictures: Tensor,
    numbers: SampleNumbers,
    *,
    times: int = 1,
    mask: Tensor | None = None,
) -> Tensor:
    """The loss of each row: the mean square error over a picture's numbers, [rows].

    numbers: of the rows
    times: times of each row, spread evenly over the distribution; the mean is taken
    mask: [rows, 1, height, width], what a place counts
    """
    dtype = "float64" if pictures.dtype == torch.float64 else "float32"
    place = numbers.uniform(dtype=dtype)
    losses = torch.zeros_like(place)
    for number in range(times):
        noise = numbers.normal(*pictures.shape[1:], dtype=dtype)
        drawn = objective.times((place + number) / times)
        noising = objective.noised(pictures, noise, drawn)
        answer = predict(noising.noisy, noising.time)
        error = answer.to(noising.target.dtype) - noising.target  # answer may be in bf16
        losses = losses + noising.weight * _mean_square(error, mask)
    return losses / times


def _mean_square(error: Tensor, mask: Tensor | None) -> Tensor:
    square = error.square()
    return (square if mask is None else square * mask).flatten(1).mean(1)
