"""The few numbers of a step, beside its arrays: its loss sum, weight and gradient norm, and what
ranks report to each other.

On a GPU they stay there, as tensors, so that nobody waits for them. On a CPU they are plain floats
(there is nothing to wait for), since a tensor of one number costs several times what is computed
with it. Both compute the same, in float64.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from samecurve.torch_engine.process_group import Comm
from samecurve.torch_engine.step_metrics import QueuedMetrics, queue_metrics


@dataclass(frozen=True)
class GradientScaling:
    """What a step's summed gradients are multiplied by before the update."""

    factor: float | torch.Tensor  # divides by weight and loss scale, and clips
    grad_norm: float | torch.Tensor  # of the whole gradient before clipping
    finite: bool | torch.Tensor  # whether loss and norm are: else there is no update


@dataclass(frozen=True)
class Clip:
    """By torch's own formula: times max_norm / (norm + epsilon), at most 1."""

    max_norm: float  # of the update's gradient; 0: any
    epsilon: float


class StepTotals(Protocol):
    """Loss sums and weights of one step: by device and row first, then over everything.

    A row is one microbatch where every bit counts, else there is one for all (EngineSetup.sum_row).
    """

    def add(
        self, device_index: int, row: int, loss_sum: torch.Tensor, weight: float | torch.Tensor
    ) -> None:
        """Called by the thread of that device of this process."""
        ...

    def all_reduce(self, comm: Comm, report: Sequence[float]) -> None:
        """Sum over the devices of all ranks; report: see step_metrics.rank_report."""
        ...

    def gradient_scaling(
        self, norm: torch.Tensor, loss_scale: torch.Tensor, *, nominal_weight: float, clip: Clip
    ) -> GradientScaling:
        """After all_reduce().

        norm: of the gradients as they are: of loss sums times loss_scale / nominal_weight
        """
        ...

    def queue_metrics(
        self, scaling: GradientScaling, loss_scale: torch.Tensor, world_size: int
    ) -> QueuedMetrics:
        """Send all of it on its way to the host."""
        ...


class HostTotals:
    """Of CPU devices."""

    def __init__(self, num_rows: int, num_devices: int) -> None:
        self._rows = [[[0.0, 0.0] for _ in range(num_rows)] for _ in range(num_devices)]
        self._loss_sum = self._weight = 0.0
        self._report: list[float] = []

    def add(
        self, device_index: int, row: int, loss_sum: torch.Tensor, weight: float | torch.Tensor
    ) -> None:
        totals = self._rows[device_index][row]
        totals[0] += loss_sum.item()
        totals[1] += float(weight)

    def all_reduce(self, comm: Comm, report: Sequence[float]) -> None:
        rows = self._over_devices()
        self._report = list(report)
        if comm.group is not None:
            values = [value for row in rows for value in row]
            sent = torch.tensor([*values, *report], dtype=torch.float64)
            summed: list[float] = comm.all_reduce(sent)().tolist()
            rows = [summed[at : at + 2] for at in range(0, len(values), 2)]
            self._report = summed[len(values) :]
        while len(rows) > 1:  # along the tree, as tree_sum
            pairs = [rows[at : at + 2] for at in range(0, len(rows), 2)]
            rows = [_added(pair) for pair in pairs]
        self._loss_sum, self._weight = rows[0]

    def _over_devices(self) -> list[list[float]]:
        if len(self._rows) == 1:
            return self._rows[0]
        return [
            [sum(values) for values in zip(*rows, strict=True)]
            for rows in zip(*self._rows, strict=True)
        ]

    def gradient_scaling(
        self, norm: torch.Tensor, loss_scale: torch.Tensor, *, nominal_weight: float, clip: Clip
    ) -> GradientScaling:
        scaled_weight = self._weight * loss_scale.item()
        correction = nominal_weight / scaled_weight if scaled_weight else math.inf
        grad_norm = norm.item() * correction
        factor = correction
        if clip.max_norm:
            # a nan stays: it is the first
            bound = max(grad_norm + clip.epsilon, clip.max_norm)
            factor = correction * (clip.max_norm / bound)
        return GradientScaling(factor, grad_norm, math.isfinite(grad_norm * self._loss_sum))

    def queue_metrics(
        self, scaling: GradientScaling, loss_scale: torch.Tensor, world_size: int
    ) -> QueuedMetrics:
        return queue_metrics(
            [
                self._loss_sum,
                self._weight,
                *self._report,
                float(scaling.grad_norm),
                float(scaling.finite),
                loss_scale.item(),
            ],
            world_size,
        )


def _added(pair: list[list[float]]) -> list[float]:
    """One row, or the sum of two."""
    if len(pair) == 1:
        return pair[0]
    left, right = pair
    return [left[0] + right[0], left[1] + right[1]]


class DeviceTotals:
    """Of GPUs, on the first of this process's."""

    def __init__(self, num_rows: int, devices: Sequence[torch.device]) -> None:
        self._device = devices[0]
        self._rows = [
            torch.zeros(num_rows, 2, dtype=torch.float64, device=device) for device in devices
        ]
        self._loss_sum = self._weight = self._report = self._rows[0]  # until all_reduce()

    def add(
        self, device_index: int, row: int, loss_sum: torch.Tensor, weight: float | torch.Tensor
    ) -> None:
        loss_sum = loss_sum.detach().double()
        self._rows[device_index][row].add_(
            torch.stack([loss_sum, _scalar(weight, loss_sum.device)])
        )

    def all_reduce(self, comm: Comm, report: Sequence[float]) -> None:
        rows = self._rows[0]
        if len(self._rows) > 1:
            rows = torch.stack([part.to(self._device) for part in self._rows]).sum(0)
        size = rows.numel()
        values = torch.tensor([*[0.0] * size, *report], dtype=torch.float64).pin_memory()
        values = values.to(self._device, non_blocking=True)
        values[:size] = rows.view(-1)
        values = comm.all_reduce(values)()
        self._loss_sum, self._weight = tree_sum(values[:size].view_as(rows)).unbind()
        self._report = values[size:]

    def gradient_scaling(
        self, norm: torch.Tensor, loss_scale: torch.Tensor, *, nominal_weight: float, clip: Clip
    ) -> GradientScaling:
        correction = nominal_weight / (self._weight * loss_scale)
        grad_norm = norm * correction
        factor = correction
        if clip.max_norm:
            bound = (grad_norm + clip.epsilon).clamp(min=clip.max_norm)
            factor = correction * (clip.max_norm / bound)
        return GradientScaling(factor, grad_norm, (grad_norm * self._loss_sum).isfinite())

    def queue_metrics(
        self, scaling: GradientScaling, loss_scale: torch.Tensor, world_size: int
    ) -> QueuedMetrics:
        last = (scaling.grad_norm, scaling.finite, loss_scale)
        values = torch.cat(
            [
                torch.stack([self._loss_sum, self._weight]),
                self._report,
                torch.stack([_scalar(value, self._device) for value in last]),
            ]
        )
        return queue_metrics(values, world_size)


def step_totals(num_rows: int, devices: Sequence[torch.device]) -> StepTotals:
    """Zeros, for so many rows of each of this process's devices."""
    if devices[0].type == "cuda":
        return DeviceTotals(num_rows, devices)
    return HostTotals(num_rows, len(devices))


def tree_sum(rows: torch.Tensor) -> torch.Tensor:
    """[n, ...] -> [...]: their sum along the tree."""
    while len(rows) > 1:
        even = len(rows) // 2 * 2
        rows = torch.cat([rows[0:even:2] + rows[1:even:2], rows[even:]])
    return rows[0]


def _scalar(value: float | torch.Tensor, device: torch.device) -> torch.Tensor:
    """float64 on the device; torch.tensor(value, device=device) would have the host wait for it."""
    if isinstance(value, torch.Tensor):
        return value.to(device, torch.float64)
    return torch.full((), value, dtype=torch.float64, device=device)
