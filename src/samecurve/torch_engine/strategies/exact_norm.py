"""The norm of a gradient whose bits do not depend on how arrays are cut into shards.

A row is an index of an array's first dimension, which no shard cuts. The sum of a row's squares is
the same for the row alone and among others: torch's kernel for CPUs takes each row by itself. On
other devices the row is added up by halves, number by number, which no kernel can do in two ways.
The rows' sums, in float64, are added up by halves too.
"""

from collections.abc import Sequence

import torch


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
