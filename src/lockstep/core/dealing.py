"""How a step's samples are shared out: ids -> slots -> devices and rounds.

A slot is at most `micro` neighbouring positions of a step, and one computation wherever it runs. Devices take
contiguous runs of slots. A device with fewer slots than rounds idles in its first rounds, so that the last round,
which reduces, is real on every device that has work at all. Dealing never sees the permutation.
"""

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Hand:
    """What one device does in a step: for each round the slot's interval of the step's positions, None where it idles."""

    rounds: tuple[tuple[int, int] | None, ...]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The real slots, in the order in which they run."""
        return [span for span in self.rounds if span is not None]


def slots(samples: int, micro: int) -> list[tuple[int, int]]:
    """The intervals [first, last) that a step of so many samples is cut into."""
    bounds = [*range(0, samples, micro), samples]
    return list(pairwise(bounds))


def deal(samples: int, micro: int, device: int, world: int) -> Hand:
    """The hand of one device out of `world`, in a step of `samples` cut into slots of `micro`."""
    every = slots(samples, micro)
    count = len(every)
    mine = every[count * device // world : count * (device + 1) // world]
    rounds = -(-count // world)
    return Hand((None,) * (rounds - len(mine)) + tuple(mine))
