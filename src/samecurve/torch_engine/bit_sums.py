"""Hashes of arrays' bits, computed where the arrays lie.

The bits of an array, as integers, are multiplied by odd factors that follow from their places, and
added up modulo 2^64. So 8 bytes an array leave a device.
"""

import torch

_CHUNK = 1 << 14  # numbers that a CPU hashes at once: they stay in its cache
_LARGE_CHUNK = 1 << 22  # those that other devices do
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
_FIRST = 0x9E3779B97F4A7C15 - (1 << 64)  # odd factors of 64 bits, as signed numbers
_SECOND = 0xBF58476D1CE4E5B9 - (1 << 64)


class BitSums:
    """Hashes of arrays' bits. Keeps the factors, which are the same for all arrays of a device.

    chunk: numbers that a CPU hashes at once; fewer take less memory, and another hash
    """

    def __init__(self, chunk: int = _CHUNK) -> None:
        self._chunk = chunk
        self._factors: dict[torch.device, torch.Tensor] = {}

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """The hash of an array; int64, on its device. It differs if a single number differs."""
        device = values.device
        chunk = self._chunk if device.type == "cpu" else _LARGE_CHUNK
        flat = values.detach().reshape(-1)
        bits = flat.view(_INTEGERS[flat.element_size()])
        factors = self._factors_of(min(len(bits), chunk), device)
        total = torch.zeros((), dtype=torch.int64, device=device)
        for part in torch.split(bits, chunk):
            total = total * _FIRST + (part * factors[: len(part)]).sum()
        return total

    def _factors_of(self, count: int, device: torch.device) -> torch.Tensor:
        """At least `count` factors: no more memory than the largest array so far needs."""
        if device not in self._factors or len(self._factors[device]) < count:
            self._factors.pop(device, None)
            self._factors[device] = _factors(count, device)
        return self._factors[device]


def _factors(count: int, device: torch.device) -> torch.Tensor:
    """Odd numbers that look like random ones, each a function of its place."""
    mixed = torch.arange(1, count + 1, device=device).mul_(_FIRST)
    mixed.bitwise_xor_(mixed >> 32).mul_(_SECOND)
    return mixed.bitwise_xor_(mixed >> 29).bitwise_or_(1)
