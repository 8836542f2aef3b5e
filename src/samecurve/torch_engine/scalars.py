"""The few numbers of a step, beside its arrays: its loss, weight and norm, and what ranks tell each
other.

On a GPU they stay there, as tensors, so that nobody waits for them. On a CPU they are plain floats
(there is nothing to wait for), since a tensor of one number costs several times what is computed
with it. Both compute the same, in float64.
"""

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from samecurve.torch_engine.process_group import Comm
from samecurve.torch_engine.step_metrics import scalar

Rows = Any  # [rows, 2]: loss sums and weights
Number = Any


class Scalars(Protocol):
    def rows(self, count: int, device: torch.device) -> Rows:
        """So many rows of zeros, for the slots of one device."""
        ...

    def add(self, rows: Rows, number: int, loss_sum: torch.Tensor, weight: Any) -> None: ...

    def merged(self, parts: Sequence[Rows]) -> Rows:
        """The sum over this process's devices, on its first."""
        ...

    def summed(self, comm: Comm, rows: Rows, told: Sequence[float]) -> tuple[Rows, Any]:
        """Over all ranks: the rows, and what else they tell each other."""
        ...

    def whole(self, rows: Rows) -> tuple[Number, Number]:
        """The sum over rows, along the tree where there are several: loss and weight of the step."""
        ...

    def taken(self, value: torch.Tensor) -> Number: ...
    def ratio(self, over: float, under: Number) -> Number: ...
    def finite(self, value: Number) -> Number: ...
    def least(self, value: Number, least: float) -> Number: ...

    def packed(self, whole: Sequence[Number], told: Any, others: Sequence[Number]) -> Any:
        """All of them in a row, as Stats reads them."""
        ...


class HostScalars:
    """Of CPU devices."""

    def rows(self, count: int, device: torch.device) -> list[list[float]]:
        return [[0.0, 0.0] for _ in range(count)]

    def add(self, rows: Rows, number: int, loss_sum: torch.Tensor, weight: Any) -> None:
        row = rows[number]
        row[0] += loss_sum.item()
        row[1] += float(weight)

    def merged(self, parts: Sequence[Rows]) -> Rows:
        return (
            parts[0]
            if len(parts) == 1
            else [
                [sum(values) for values in zip(*rows, strict=True)]
                for rows in zip(*parts, strict=True)
            ]
        )

    def summed(self, comm: Comm, rows: Rows, told: Sequence[float]) -> tuple[Rows, list[float]]:
        if comm.group is None:
            return rows, list(told)
        values = [value for row in rows for value in row]
        found: list[float] = comm.all_reduce(
            torch.tensor([*values, *told], dtype=torch.float64)
        )().tolist()
        return [found[at : at + 2] for at in range(0, len(values), 2)], found[len(values) :]

    def whole(self, rows: Rows) -> tuple[float, float]:
        while len(rows) > 1:
            rows = [
                (
                    [a + b for a, b in zip(*rows[at : at + 2], strict=True)]
                    if at + 1 < len(rows)
                    else rows[at]
                )
                for at in range(0, len(rows), 2)
            ]
        return rows[0][0], rows[0][1]

    def taken(self, value: torch.Tensor) -> float:
        return value.item()

    def ratio(self, over: float, under: float) -> float:
        return over / under if under else math.inf

    def finite(self, value: float) -> bool:
        return math.isfinite(value)

    def least(self, value: float, least: float) -> float:
        return max(value, least)  # nan stays: it is the first

    def packed(
        self, whole: Sequence[float], told: list[float], others: Sequence[float]
    ) -> list[float]:
        return [*whole, *told, *map(float, others)]


class DeviceScalars:
    """device: this process's first."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def rows(self, count: int, device: torch.device) -> torch.Tensor:
        return torch.zeros(count, 2, dtype=torch.float64, device=device)

    def add(self, rows: Rows, number: int, loss_sum: torch.Tensor, weight: Any) -> None:
        rows[number].add_(
            torch.stack([loss_sum.detach().double(), scalar(weight, loss_sum.device)])
        )

    def merged(self, parts: Sequence[Rows]) -> torch.Tensor:
        whole: torch.Tensor = (
            parts[0]
            if len(parts) == 1
            else torch.stack([part.to(self._device) for part in parts]).sum(0)
        )
        return whole

    def summed(
        self, comm: Comm, rows: Rows, told: Sequence[float]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found = (
            torch.tensor([*[0.0] * rows.numel(), *told], dtype=torch.float64)
            .pin_memory()
            .to(self._device, non_blocking=True)
        )
        found[: rows.numel()] = rows.view(-1)
        found = comm.all_reduce(found)()
        return found[: rows.numel()].view_as(rows), found[rows.numel() :]

    def whole(self, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        loss, weight = tree(rows).unbind()
        return loss, weight

    def taken(self, value: torch.Tensor) -> torch.Tensor:
        return value

    def ratio(self, over: float, under: Number) -> Number:
        return over / under

    def finite(self, value: torch.Tensor) -> torch.Tensor:
        return value.isfinite()

    def least(self, value: torch.Tensor, least: float) -> torch.Tensor:
        return value.clamp(min=least)

    def packed(
        self, whole: Sequence[torch.Tensor], told: torch.Tensor, others: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        return torch.cat(
            [torch.stack(list(whole)), told, torch.stack([other.double() for other in others])]
        )


def scalars_on(device: torch.device) -> Scalars:
    return DeviceScalars(device) if device.type == "cuda" else HostScalars()


def tree(rows: torch.Tensor) -> torch.Tensor:
    """[n, ...] -> [...]: their sum along the tree."""
    while len(rows) > 1:
        even = len(rows) // 2 * 2
        rows = torch.cat([rows[0:even:2] + rows[1:even:2], rows[even:]])
    return rows[0]
