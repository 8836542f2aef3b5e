"""The shapes that pictures are cut to, so that samples of one shape can share a step.

The shapes follow from three numbers alone: the resolution, the step of the sides, and how long a
picture may be. A picture goes to the shape whose ratio of sides is nearest to its own. So a picture
has the same bucket whatever other pictures there are.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from samecurve.seam import UserError
from samecurve_products.pictures.diffusion.sections import DiffusionData

Shape = tuple[int, int]  # width and height, in pixels

_ROUNDING = 1e-9  # of a ratio times a side


@dataclass(frozen=True)
class Buckets:
    """The rule by which a picture gets its shape.

    resolution: the sides of the square bucket. step: sides are multiples of it. longest: longer
    side / shorter side at most. by_ratio: False: every picture is cut to the square
    """

    resolution: int
    step: int
    longest: float
    by_ratio: bool = True

    @classmethod
    def of(cls, data: DiffusionData) -> "Buckets":
        """The rule of a config. UserError: as check_sides()."""
        check_sides(data)
        return cls(data.resolution, data.bucket_step, data.longest, data.buckets)

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """All shapes, from the tallest to the widest.

        A shape has at most as many pixels as the square, and fits into no other shape: neither side
        can grow by a step without the area, or the ratio of the sides, becoming too large. That
        gives each ratio the most pixels that the memory of a square allows.
        Source: the idea of buckets by ratio is NovelAI's ("NovelAI Improvements on Stable
        Diffusion", 2022); the rule that no shape fits into another one is ours.
        """
        if not self.by_ratio:
            return ((self.resolution, self.resolution),)
        wide: list[Shape] = []
        longest_yet = 0
        for short in range(self.resolution, 0, -self.step):
            by_area = self.resolution**2 // short
            by_ratio = math.floor(self.longest * short + _ROUNDING)
            long = min(by_area, by_ratio) // self.step * self.step
            if long > longest_yet:
                longest_yet = long
                wide.append((long, short))
        tall = [(short, long) for long, short in reversed(wide) if long > short]
        return (*tall, *wide)

    def shape_of(self, width: int, height: int) -> Shape:
        """The shape for a picture of these sides; of two equally near ones the larger, or squarer.

        The distance of ratios is that of their logarithms, so a tall picture gets the mirror image
        of what the wide one gets.
        """

        def rank(shape: Shape) -> tuple[float, int, int]:
            one, other = width * shape[1], height * shape[0]
            return max(one, other) / min(one, other), -shape[0] * shape[1], max(shape)

        return min(self.shapes, key=rank)


def check_sides(data: DiffusionData, multiple: int = 1) -> None:
    """Check that the sides of all buckets are what the model can take.

    multiple: the sides of the model's pictures are multiples of it
    UserError: they are not, or the resolution is no multiple of the step.
    """
    if data.buckets:
        check_resolution(data.resolution, data.bucket_step, multiple)
    elif data.resolution % multiple:
        nearest = _nearest(data.resolution, multiple)
        raise UserError(
            f"the model takes pictures whose sides are multiples of {multiple}, and"
            f" data.resolution is {data.resolution}",
            f"--set data.resolution={' or '.join(map(str, nearest))}",
            "data.resolution",
        )


def check_resolution(resolution: int, step: int, multiple: int = 1) -> None:
    """Check that the square bucket's sides are multiples of the step.

    multiple: sides that the model can take are multiples of it
    UserError: they are not, or the step is no multiple of what the model takes.
    """
    if step % multiple:
        nearest = _nearest(step, multiple)
        raise UserError(
            f"the model takes pictures whose sides are multiples of {multiple}, and"
            f" data.bucket_step is {step}",
            f"--set data.bucket_step={' or '.join(map(str, nearest))}",
            "data.bucket_step",
        )
    if resolution % step:
        nearest = _nearest(resolution, step)
        raise UserError(
            f"data.resolution {resolution} is no multiple of data.bucket_step {step}",
            f"--set data.resolution={' or '.join(map(str, nearest))}; or another bucket_step, of"
            " which the model's own pictures are multiples",
            "data.resolution",
        )


def _nearest(number: int, step: int) -> Sequence[int]:
    """The multiples of a step below and above a number."""
    below = number // step * step
    return [multiple for multiple in (below, below + step) if multiple]


def show_shape(shape: Shape) -> str:
    """(768, 1344) -> '768x1344'."""
    return f"{shape[0]}x{shape[1]}"
