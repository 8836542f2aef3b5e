"""The hash of an array's bits: any single change shows, and nothing but the bits counts."""

import pytest
import torch

from samecurve.features.guard.weights import BitSums

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
bit_sum = BitSums().of
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_bit_of_any_number_shows(dtype: torch.dtype) -> None:
    """Also in a tensor that is hashed in several pieces."""
    values = (torch.randn(70_000, generator=torch.Generator().manual_seed(0)) * 50).to(dtype)
    bits = values.view(INTEGERS[values.element_size()])
    expected = bit_sum(values)
    for place in (0, 1, 65_535, 65_536, 69_999):
        for bit in range(8 * values.element_size()):
            was = bits[place].clone()
            bits[place] ^= torch.tensor(1).bitwise_left_shift(bit).to(bits.dtype)
            assert bit_sum(values) != expected, (place, bit)
            bits[place] = was
    assert bit_sum(values) == expected


def test_an_exchange_of_two_numbers_shows() -> None:
    values = torch.arange(1.0, 9.0)
    swapped = values.clone()
    swapped[[0, 1]] = values[[1, 0]]
    assert bit_sum(swapped) != bit_sum(values)


def test_drifts_in_last_digits_show() -> None:
    """Two numbers that move by the same in opposite directions, wherever they are."""
    bits = torch.zeros(400, dtype=torch.int32)
    sums = set()
    for first in range(0, 400, 7):
        for second in range(0, 400, 11):
            moved = bits.clone()
            moved[first] += 1
            moved[second] -= 1
            sums.add((first == second, int(bit_sum(moved.view(torch.float32)))))
    same = int(bit_sum(bits.view(torch.float32)))
    assert (False, same) not in sums


def test_strides_and_empty_tensors() -> None:
    values = torch.randn(30, 40)
    assert bit_sum(values.t()) == bit_sum(values.t().contiguous())
    assert bit_sum(torch.zeros(0)) == 0
    assert bit_sum(torch.tensor(True)) != bit_sum(torch.tensor(False))
    assert bit_sum(torch.tensor(0.0)) != bit_sum(torch.tensor(-0.0))
