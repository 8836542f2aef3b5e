"""Which blocks' frozen weights lie in host memory (devices.offload_frozen), and their bytes.

The plan counts by this page, and the engine moves the blocks that it names.
"""

import math
from dataclasses import dataclass

from samecurve.core.planning.facts import Facts

BUFFERS = 2  # on the device: the block that computes, and the one that is copied ahead of it


def offloaded_blocks(count: int, share: float) -> tuple[int, ...]:
    """The numbers of the blocks that lie in host memory, of `count` with frozen weights.

    They are spread evenly over the model: the blocks that stay on the device between two of them
    give the copy time.
    """
    wanted = min(count, math.ceil(share * count - 1e-9))
    return tuple(
        number
        for number in range(count)
        if (number + 1) * wanted // count > number * wanted // count
    )


@dataclass(frozen=True)
class HostBlocks:
    """The frozen weights that lie in host memory."""

    blocks: int
    of: int  # blocks of the model that have frozen weights
    numbers: int  # in the format of weights
    packed: int  # bytes of packed (quantized) arrays
    width: int  # bytes of a weight
    largest: int  # bytes of the largest block

    @property
    def bytes(self) -> int:
        return self.numbers * self.width + self.packed

    @property
    def buffers(self) -> int:
        """Buffers on the device, each as large as the largest block."""
        return min(BUFFERS, self.blocks)

    @property
    def saves(self) -> int:
        """Bytes by which a device holds less; negative if it holds more."""
        return self.bytes - self.buffers * self.largest


def host_blocks(facts: Facts, share: float, width: int) -> HostBlocks:
    """The blocks that lie in host memory. width: bytes of a weight"""
    sizes = list(zip(facts.model.frozen_block_params, facts.model.frozen_block_packed, strict=True))
    moved = [sizes[number] for number in offloaded_blocks(len(sizes), share)]
    return HostBlocks(
        blocks=len(moved),
        of=len(sizes),
        numbers=sum(numbers for numbers, _ in moved),
        packed=sum(packed for _, packed in moved),
        width=width,
        largest=max((numbers * width + packed for numbers, packed in moved), default=0),
    )
