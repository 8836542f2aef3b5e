"""Which steps of a run are trained anew, and from where: pure."""

import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from samecurve.seam import UserError

MOST_STEPS = 100  # that are trained anew for a step that nobody named
_NEAR = 3  # steps after a start in which rounding has not grown yet


@dataclass(frozen=True, order=True)
class Pick:
    """A step, and the nearest earlier step from which the run can go on. 0: its beginning."""

    start: int
    step: int


def pick_named(step: int, starts: Sequence[int], last: int) -> Pick:
    """The step that the user names. starts: in rising order; last: the run's last step.

    UserError: the run has no such step, or nothing before it is left.
    """
    if not 1 <= step <= last:
        raise UserError(
            f"--step {step}: the journal has steps 1 to {last}", "one of these", "--step"
        )
    before = bisect_left(starts, step)
    if not before:
        raise UserError(
            f"--step {step}: no checkpoint before it is left, and the run began from another one",
            f"a step from {starts[0] + 1} on" if starts else "a run that has saved",
            "--step",
        )
    return Pick(starts[before - 1], step)


def pick_at_random(
    number: int, starts: Sequence[int], last: int, *, same_bits: bool, seed: int
) -> list[Pick]:
    """Some steps, each of which follows a start closely enough.

    same_bits: otherwise they follow it at once, since rounding grows from step to step
    """
    most = MOST_STEPS if same_bits else _NEAR
    ends = [*starts[1:], last]
    near = [
        Pick(start, step)
        for start, end in zip(starts, ends, strict=True)
        for step in range(start + 1, min(start + most, end) + 1)
    ]
    return sorted(random.Random(seed).sample(near, min(number, len(near))))
