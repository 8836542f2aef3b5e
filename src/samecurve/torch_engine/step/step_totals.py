"""The few numbers of a step, beside its arrays: its loss sum and weight, those of what is logged
beside the loss, its gradient norm, and what ranks report to each other.

On a GPU they stay there, as tensors, so that nobody waits for them. On a CPU they are plain floats
(there is nothing to wait for), since a tensor of one number costs several times what is computed
with it. Both compute the same, in float64.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from samecurve.core.determinism.mean import NEGATIVE_WEIGHT_REMEDY, Mean
from samecurve.errors import UserError
from samecurve.torch_engine.process_group import Comm
from samecurve.torch_engine.step.step_metrics import MetricsLayout, QueuedMetrics, queue_metrics


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

    def add(self, device_index: int, row: int, means: Sequence[Mean]) -> None:
        """A microbatch's, the loss first. Called by the thread of that device of this process."""
        ...

    def all_reduce(self, comm: Comm, report: Sequence[float], num_means: int) -> None:
        """Sum over the devices of all ranks.

        report: see step_metrics.rank_report
        num_means: of a microbatch
        """
        ...

    def gradient_scaling(
        self, norm: torch.Tensor, loss_scale: torch.Tensor, *, nominal_weight: float, clip: Clip
    ) -> GradientScaling:
        """After all_reduce().

        norm: of the gradients as they are: of loss sums times loss_scale / nominal_weight
        """
        ...

    def queue_metrics(
        self, scaling: GradientScaling, loss_scale: torch.Tensor, layout: MetricsLayout
    ) -> QueuedMetrics:
        """Send all of it on its way to the host."""
        ...


class HostTotals:
    """Of CPU devices."""

    def __init__(self, num_rows: int, num_devices: int) -> None:
        # of each device and row: sum and weight of each mean, empty where nothing was added
        self._rows: list[list[list[float]]] = [
            [[] for _ in range(num_rows)] for _ in range(num_devices)
        ]
        self._sums: list[float] = []
        self._report: list[float] = []

    def add(self, device_index: int, row: int, means: Sequence[Mean]) -> None:
        values = [_number(number) for mean in means for number in mean]
        if min(values[1::2]) < 0:
            raise UserError(
                f"a microbatch's loss has the weight {min(values[1::2]):g}", NEGATIVE_WEIGHT_REMEDY
            )
        before = self._rows[device_index][row]
        self._rows[device_index][row] = _added([before, values]) if before else values

    def all_reduce(self, comm: Comm, report: Sequence[float], num_means: int) -> None:
        width = 2 * num_means
        rows = self._over_devices([0.0] * width)
        self._report = list(report)
        if comm.group is not None:
            values = [value for row in rows for value in row]
            sent = torch.tensor([*values, *report], dtype=torch.float64)
            summed: list[float] = comm.all_reduce(sent)().tolist()
            rows = [summed[at : at + width] for at in range(0, len(values), width)]
            self._report = summed[len(values) :]
        while len(rows) > 1:  # along the tree, as tree_sum
            pairs = [rows[at : at + 2] for at in range(0, len(rows), 2)]
            rows = [_added(pair) for pair in pairs]
        self._sums = rows[0]

    def _over_devices(self, zeros: list[float]) -> list[list[float]]:
        if len(self._rows) == 1:
            return [row or zeros for row in self._rows[0]]
        return [
            [sum(values) for values in zip(*(row or zeros for row in rows), strict=True)]
            for rows in zip(*self._rows, strict=True)
        ]

    def gradient_scaling(
        self, norm: torch.Tensor, loss_scale: torch.Tensor, *, nominal_weight: float, clip: Clip
    ) -> GradientScaling:
        loss_sum, weight = self._sums[:2]
        scaled_weight = weight * loss_scale.item()
        correction = nominal_weight / scaled_weight if scaled_weight else math.inf
        grad_norm = norm.item() * correction
        factor = correction
        if clip.max_norm:
            # a nan stays: it is the first
            bound = max(grad_norm + clip.epsilon, clip.max_norm)
            factor = correction * (clip.max_norm / bound)
        return GradientScaling(
            factor, grad_norm, math.isfinite(grad_norm * loss_sum) and weight > 0
        )

    def queue_metrics(
        self, scaling: GradientScaling, loss_scale: torch.Tensor, layout: MetricsLayout
    ) -> QueuedMetrics:
        return queue_metrics(
            [
                *self._sums,
                *self._report,
                float(scaling.grad_norm),
                float(scaling.finite),
                loss_scale.item(),
            ],
            layout,
        )


def _number(value: float | torch.Tensor) -> float:
    return value.item() if isinstance(value, torch.Tensor) else float(value)


def _added(pair: list[list[float]]) -> list[float]:
    """One row, or the sum of two."""
    if len(pair) == 1:
        return pair[0]
    return [left + right for left, right in zip(*pair, strict=True)]


class DeviceTotals:
    """Of GPUs, on the first of this process's."""

    def __init__(self, num_rows: int, devices: Sequence[torch.device]) -> None:
        self._devices, self._num_rows = devices, num_rows
        # of each device [rows, sum and weight of each mean]; None: nothing was added there
        self._rows: list[torch.Tensor | None] = [None] * len(devices)
        self._sums = self._report = torch.zeros(0)  # until all_reduce()

    def add(self, device_index: int, row: int, means: Sequence[Mean]) -> None:
        device = self._devices[device_index]
        values = torch.stack([_scalar(number, device) for mean in means for number in mean])
        rows = self._rows[device_index]
        if rows is None:
            shape = (self._num_rows, len(values))
            rows = torch.zeros(shape, dtype=torch.float64, device=device)
            self._rows[device_index] = rows
        rows[row].add_(values)

    def all_reduce(self, comm: Comm, report: Sequence[float], num_means: int) -> None:
        device = self._devices[0]
        shape = (self._num_rows, 2 * num_means)
        rows = torch.zeros(shape, dtype=torch.float64, device=device)
        for part in self._rows:
            if part is not None:
                rows = rows + part.to(device)
        size = rows.numel()
        values = torch.tensor([*[0.0] * size, *report], dtype=torch.float64).pin_memory()
        values = values.to(device, non_blocking=True)
        values[:size] = rows.view(-1)
        values = comm.all_reduce(values)()
        self._sums = tree_sum(values[:size].view_as(rows))
        self._report = values[size:]

    def gradient_scaling(
        self, norm: torch.Tensor, loss_scale: torch.Tensor, *, nominal_weight: float, clip: Clip
    ) -> GradientScaling:
        loss_sum, weight = self._sums[0], self._sums[1]
        correction = nominal_weight / (weight * loss_scale)
        grad_norm = norm * correction
        factor = correction
        if clip.max_norm:
            bound = (grad_norm + clip.epsilon).clamp(min=clip.max_norm)
            factor = correction * (clip.max_norm / bound)
        return GradientScaling(factor, grad_norm, (grad_norm * loss_sum).isfinite() & (weight > 0))

    def queue_metrics(
        self, scaling: GradientScaling, loss_scale: torch.Tensor, layout: MetricsLayout
    ) -> QueuedMetrics:
        last = (scaling.grad_norm, scaling.finite, loss_scale)
        values = torch.cat(
            [
                self._sums,
                self._report,
                torch.stack([_scalar(value, self._devices[0]) for value in last]),
            ]
        )
        return queue_metrics(values, layout)


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
        return value.detach().to(device, torch.float64)
    return torch.full((), value, dtype=torch.float64, device=device)
