"""Augmentation of windows [rows, channels, time], on the device, for a task's loss.

`numbers` is samecurve.rng(batch): random numbers follow from (seed, epoch, sample), on any devices
and in any microbatch. They are float32 whatever the run's precision. Everything is computed element
by element, so a row is the same to the last bit whatever the other rows of the batch are.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from samecurve.seam import SampleNumbers
from samecurve_products.task_parts.on_device import on_device

_WAVES = 3  # sine waves that a warp of time consists of


def jitter(x: Tensor, numbers: SampleNumbers, deviation: float) -> Tensor:
    """Add noise of this deviation to each value."""
    noise: Tensor = numbers.normal(*x.shape[1:])
    return x + deviation * noise.to(x.dtype)


def scale(x: Tensor, numbers: SampleNumbers, deviation: float) -> Tensor:
    """Multiply each channel of each row by a factor around 1."""
    drawn: Tensor = numbers.normal(x.shape[1], 1)
    return x * (1 + deviation * drawn.to(x.dtype))


def drop_channels(x: Tensor, numbers: SampleNumbers, probability: float) -> Tensor:
    """Set each channel of each row to 0 with this probability."""
    kept: Tensor = numbers.uniform(x.shape[1], 1)
    return torch.where(kept < probability, torch.zeros_like(x), x)


def warp_time(x: Tensor, numbers: SampleNumbers, deviation: float) -> Tensor:
    """Replay each row at a speed that varies around 1 by this deviation; its ends stay in place.

    Positions are t + sum of a_k sin(pi k t / T), with a_k so that the speed's deviation is that of
    each wave together; values between time steps are interpolated linearly.
    """
    last = x.shape[-1] - 1
    if last < 1:
        return x
    drawn: Tensor = numbers.normal(_WAVES)
    waves = on_device(torch.from_numpy(_waves(last)), x.device)
    positions = torch.arange(last + 1, dtype=torch.float32, device=x.device).expand(len(x), -1)
    for number in range(_WAVES):
        positions = positions + deviation * drawn[:, number, None] * waves[number]
    positions = positions.clamp(0, last)
    before = positions.floor().clamp(max=last - 1)
    share = (positions - before).to(x.dtype)[:, None]
    places = before.long()[:, None].expand_as(x)
    return x.gather(2, places) * (1 - share) + x.gather(2, places + 1) * share


def _waves(last: int) -> NDArray[np.float32]:
    """[_WAVES, last + 1], made on the host: the same bits for any number of rows."""
    steps = np.arange(last + 1) / last
    waves = [
        last / (math.pi * number * math.sqrt(_WAVES / 2)) * np.sin(math.pi * number * steps)
        for number in range(1, _WAVES + 1)
    ]
    return np.stack(waves).astype(np.float32)
