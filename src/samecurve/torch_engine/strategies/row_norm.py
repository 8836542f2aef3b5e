"""The norm of a gradient whose bits do not depend on how arrays are cut into shards.

A row is an index of an array's first dimension, which no shard cuts. The sum of a row's squares is
the same for the row alone and among others: torch's kernel for CPUs takes each row by itself. On
other devices the row is added up by halves, number by number, which no kernel can do in two ways.
The rows' sums, in float64, are added up by halves too.
"""

import math
from collections.abc import Sequence

import torch

_SMALL = 1 << 15  # numbers of an array that is cheaper copied than looked at by itself


def num_rows(shape: Sequence[int]) -> int:
    """The rows of an array; a single number is one."""
    return shape[0] if shape else 1


def squares_by_row(array: torch.Tensor) -> torch.Tensor:
    """The sum of squares of each row of a real array; float64."""
    if not array.numel():
        return array.new_zeros(num_rows(array.shape), dtype=torch.float64)
    rows = array.reshape(num_rows(array.shape), -1).contiguous()
    if rows.device.type == "cpu":
        norms: torch.Tensor = torch.linalg.vector_norm(rows, dim=1)
        return norms.double().square_()
    return _halved(rows.square()).double()


class RowSquares:
    """The sums of squares of the rows of many arrays, in a few calls of torch: small arrays with
    rows of one length are put together.
    """

    def __init__(self, arrays: Sequence[torch.Tensor]) -> None:
        """arrays: of the shapes, and on the device, of those to come"""
        self.shapes = shapes = [array.shape for array in arrays]
        self._on_cpu = arrays[0].device.type == "cpu"
        self._matrices = [(num_rows(shape), math.prod(shape[1:])) for shape in shapes]
        together: dict[int, list[int]] = {}  # numbers of arrays, by the length of their rows
        self._alone: list[int] = []
        begins, total = [], 0
        for number, shape in enumerate(shapes):
            begins.append(total)
            rows = num_rows(shape)
            total += rows
            if 0 < shape.numel() <= _SMALL:
                together.setdefault(shape.numel() // rows, []).append(number)
            else:
                self._alone.append(number)
        self._together = list(together.items())
        in_turn = [*(n for _, numbers in self._together for n in numbers), *self._alone]
        lie_at = torch.empty(total, dtype=torch.int64)
        at = 0
        for number in in_turn:  # where the rows of each array lie among all
            rows = num_rows(shapes[number])
            lie_at[begins[number] : begins[number] + rows] = torch.arange(at, at + rows)
            at += rows
        self._in_order = lie_at.to(arrays[0].device)

    def __call__(self, arrays: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sum of squares of each row, in the order of the arrays; float64."""
        parts = []
        for width, numbers in self._together:
            parts.append(torch.cat([arrays[number].reshape(-1, width) for number in numbers]))
        for number in self._alone:
            parts.append(arrays[number].reshape(self._matrices[number]).contiguous())
        if not self._on_cpu:
            return torch.cat(list(map(squares_by_row, parts)))[self._in_order]
        norms = [torch.linalg.vector_norm(rows, dim=1) for rows in parts]  # as squares_by_row()
        return torch.cat(norms).double().square_()[self._in_order]


def norm_of_rows(squares: torch.Tensor) -> torch.Tensor:
    """The norm of all arrays whose rows have these sums of squares. `squares` is overwritten."""
    return _halved(squares.view(1, -1))[0].sqrt()


def _halved(rows: torch.Tensor) -> torch.Tensor:
    """The sum of each row, [number, width] -> [number]: the second half of all rows is added to the
    first one until one number is left. The rows are overwritten.
    """
    width = rows.shape[1]
    while width > 1:
        half = width // 2
        rows[:, :half].add_(rows[:, half : 2 * half])
        if width % 2:
            rows[:, :1].add_(rows[:, width - 1 : width])
        width = half
    return rows[:, 0]
