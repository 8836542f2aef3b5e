"""The few numbers of a step, beside its arrays: loss sums and weights, the gradient's norm, what
ranks report to each other, and the row of numbers in which all of them travel to the loop.

On a GPU these numbers stay on the GPU as tensors, so that the host never waits for it. On a CPU
they are plain floats (there is nothing to wait for), since a tensor of one number costs several
times what is computed with it. Both compute the same, in float64.

The row: loss sum, weight, the same two for each other mean, the report of all ranks (a count for
each request, seconds of waiting for data by rank, seconds of a forward pass by rank, peak bytes by
device), gradient norm, whether the step was finite, loss scale.
"""

import json
import math
import resource
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import add
from typing import Any

import torch

from samecurve.core.determinism import NEGATIVE_WEIGHT_REMEDY, Mean
from samecurve.core.determinism.step_arithmetic import (
    Clip,
    GradientScaling,
    NumberFunctions,
    scale_gradient,
)
from samecurve.core.events import REQUESTS
from samecurve.core.planning.plan import Plan
from samecurve.core.protocols import StepMetrics
from samecurve.errors import UserError
from samecurve.torch_engine.process_group import Comm, texts_of_all

Number = float | torch.Tensor


_FLOATS = NumberFunctions(
    divide=lambda x, y: x / y if y else math.inf,
    maximum=max,  # a nan stays a nan: max() keeps its first argument
    is_finite=math.isfinite,
)
_TENSORS = NumberFunctions(
    divide=lambda x, y: x / y,
    maximum=lambda x, least: x.clamp(min=least),
    is_finite=torch.isfinite,
)


class StepTotals(ABC):
    """The loss sums and weights of one step: first by microbatch, then along the step's tree."""

    _numbers: NumberFunctions
    _sums: Any  # the sum and the weight of each mean, after all_reduce()

    @abstractmethod
    def add(self, device_index: int, number: int, means: Sequence[Mean]) -> None:
        """Add the means of the microbatch of this number, the loss first. Called by the thread of
        that device.
        """

    @abstractmethod
    def all_reduce(self, comm: Comm, report: Sequence[float], num_means: int) -> None:
        """Sum over the devices of all ranks.

        report: what RankReport gives.
        num_means: how many means a microbatch has.
        """

    def gradient_scaling(
        self, norm: Number, loss_scale: Number, *, nominal_weight: float, clip: Clip
    ) -> GradientScaling:
        """The scaling of the gradients, after all_reduce().

        norm: of the gradients as they are, those of loss sums times loss_scale / nominal_weight.
        """
        if self._numbers is _FLOATS:
            norm, loss_scale = float(norm), float(loss_scale)
        return scale_gradient(
            loss_sum=self._sums[0],
            weight=self._sums[1],
            summed_norm=norm,
            loss_scale=loss_scale,
            nominal_weight=nominal_weight,
            clip=clip,
            numbers=self._numbers,
        )

    @abstractmethod
    def queue_metrics(self, scaling: GradientScaling, names: Sequence[str]) -> "QueuedMetrics":
        """Send the row on its way to the host.

        names: of the means beside the loss, in their order.
        """


class HostTotals(StepTotals):
    """The totals of a step on CPU devices."""

    _numbers = _FLOATS

    def __init__(self, num_microbatches: int, devices: Sequence[torch.device]) -> None:
        del devices
        self._num_microbatches = num_microbatches
        # by the number of a microbatch of this process: sum and weight of each mean
        self._added: dict[int, list[float]] = {}
        self._report: Sequence[float] = ()
        self._world_size = 1

    def add(self, _device_index: int, number: int, means: Sequence[Mean]) -> None:
        values: list[float] = []
        for mean in means:
            for value in mean:
                values.append(value.item() if isinstance(value, torch.Tensor) else float(value))
        if min(values[1::2]) < 0:
            raise UserError(
                f"a microbatch's loss has the weight {min(values[1::2]):g}", NEGATIVE_WEIGHT_REMEDY
            )
        self._added[number] = values

    def all_reduce(self, comm: Comm, report: Sequence[float], num_means: int) -> None:
        width = 2 * num_means
        absent = repeat([0.0] * width)  # another rank has the microbatch
        rows = list(map(self._added.get, range(self._num_microbatches), absent))
        self._report, self._world_size = report, comm.world_size
        if comm.group is not None:
            values = list(chain.from_iterable(rows))
            sent = torch.tensor([*values, *report], dtype=torch.float64)
            summed: list[float] = comm.all_reduce(sent)().tolist()
            rows = [summed[at : at + width] for at in range(0, len(values), width)]
            self._report = summed[len(values) :]
        while len(rows) > 1:  # along the tree, as tree_sum() does
            lefts, rights = rows[::2], rows[1::2]
            sums = [list(map(add, left, right)) for left, right in zip(lefts, rights, strict=False)]
            rows = [*sums, *lefts[len(rights) :]]
        self._sums = rows[0]

    def queue_metrics(self, scaling: GradientScaling, names: Sequence[str]) -> "QueuedMetrics":
        last = (scaling.grad_norm, scaling.finite, scaling.loss_scale)
        values = [*self._sums, *self._report, *map(float, last)]
        return QueuedMetrics(values, names, self._world_size, time.perf_counter(), on_host=True)


class DeviceTotals(StepTotals):
    """The totals of a step on GPUs, kept on the first GPU of this process."""

    _numbers = _TENSORS

    def __init__(self, num_microbatches: int, devices: Sequence[torch.device]) -> None:
        self._devices, self._num_microbatches = devices, num_microbatches
        # by device [microbatch, sum and weight of each mean]; None: nothing was added there
        self._rows: list[torch.Tensor | None] = [None] * len(devices)
        self._report = torch.zeros(0)  # until all_reduce()
        self._world_size = 1

    def add(self, device_index: int, number: int, means: Sequence[Mean]) -> None:
        device = self._devices[device_index]
        values = torch.stack([_scalar(value, device) for mean in means for value in mean])
        rows = self._rows[device_index]
        if rows is None:
            shape = (self._num_microbatches, len(values))
            rows = torch.zeros(shape, dtype=torch.float64, device=device)
            self._rows[device_index] = rows
        rows[number].add_(values)

    def all_reduce(self, comm: Comm, report: Sequence[float], num_means: int) -> None:
        device = self._devices[0]
        shape = (self._num_microbatches, 2 * num_means)
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
        self._report, self._world_size = values[size:], comm.world_size

    def queue_metrics(self, scaling: GradientScaling, names: Sequence[str]) -> "QueuedMetrics":
        last = (scaling.grad_norm, scaling.finite, scaling.loss_scale)
        last_values = torch.stack([_scalar(value, self._devices[0]) for value in last])
        values = torch.cat([self._sums, self._report, last_values])
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record()
        return QueuedMetrics(host, names, self._world_size, ready, on_host=False)


def tree_sum(rows: torch.Tensor) -> torch.Tensor:
    """[n, ...] -> [...]: the sum of the rows along the step's tree."""
    while len(rows) > 1:
        even = len(rows) // 2 * 2
        rows = torch.cat([rows[0:even:2] + rows[1:even:2], rows[even:]])
    return rows[0]


def _scalar(value: float | torch.Tensor, device: torch.device) -> torch.Tensor:
    """A float64 on the device; torch.tensor(value, device=device) would make the host wait."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(device, torch.float64)
    return torch.full((), value, dtype=torch.float64, device=device)


@dataclass(slots=True)  # not frozen: one is made for every step
class QueuedMetrics:
    """The metrics of a step on their way to the host, or there already; read() waits for them."""

    values: torch.Tensor | list[float]  # the row
    names: Sequence[str]  # of the means beside the loss
    world_size: int
    ready: torch.cuda.Event | float  # tells when the step is done, or (on a CPU) when it was done
    on_host: bool

    def read(self) -> StepMetrics:
        done_at, values = self.ready, self.values
        if not isinstance(done_at, float):
            done_at.synchronize()
            done_at = time.perf_counter()
        if isinstance(values, torch.Tensor):
            values = values.tolist()
        begin = 2 + 2 * len(self.names)  # of the report
        report, (norm, finite, scale) = values[begin:-3], values[-3:]
        by_rank = report[len(REQUESTS) :]
        ranks = self.world_size
        means = {}
        for number, name in enumerate(self.names, 1):
            total, weight = values[2 * number : 2 * number + 2]
            means[name] = total / weight if weight else math.nan
        return StepMetrics(
            loss=values[0] / values[1] if values[1] else math.nan,
            weight=values[1],
            grad_norm=norm,
            finite=bool(finite),
            requests=tuple(map(int, report[: len(REQUESTS)])),
            wait_seconds=tuple(by_rank[:ranks]),
            memory_bytes=tuple(by_rank[2 * ranks :]),
            done_at=done_at,
            scale=scale,
            forward_seconds=tuple(by_rank[ranks : 2 * ranks]),
            means=means,
        )


class NamedMeans:
    """The means that a task's loss gives beside the loss itself: the same names in every
    microbatch, on every rank, since each rank adds up what the others counted.
    """

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()  # without the loss, in the order of in_order()
        self._keys: frozenset[str] = frozenset()  # with the loss; empty: no microbatch was seen

    def in_order(self, losses: Mapping[str, Mean]) -> list[Mean]:
        """The means of a microbatch, the loss first. UserError: another one had other names."""
        if not self._keys:
            self._keys = frozenset(losses)
            self.names = tuple(sorted(losses.keys() - {"loss"}))
        elif losses.keys() != self._keys:
            from samecurve.core.named_means import other_names

            raise other_names(losses, self._keys)
        means = [losses["loss"]]
        for name in self.names:
            means.append(losses[name])
        return means

    def agree(self, comm: Comm, device: torch.device) -> None:
        """Let every rank know the names, once each has done its first step: a rank may have had no
        microbatch.

        UserError, on every rank: the names differ.
        """
        if comm.group is None:
            return
        text = json.dumps(self.names).encode() if self._keys else b""
        texts = filter(None, texts_of_all(comm, text, device))
        lists = {tuple(json.loads(text)) for text in texts}
        if len(lists) > 1:
            from samecurve.core.named_means import other_names

            one, other, *_ = sorted(lists)
            raise other_names(["loss", *one], ["loss", *other])
        for self.names in lists:  # none, where no rank had a microbatch
            self._keys = frozenset(["loss", *self.names])


class RankReport:
    """The report of one rank to all others in each step: each number has a place of its own, so
    that the sum over ranks holds all of them.
    """

    def __init__(self, plan: Plan, rank: int, devices: Sequence[torch.device]) -> None:
        self.forward_seconds = 0.0  # of a forward pass of this rank, where that is timed
        self._rank, self._world_size = rank, plan.layout.world_size
        self._own_devices = plan.layout.devices_of(rank)
        self._peak_memory = PeakMemory(devices)
        self._values = [0.0] * (2 * plan.layout.world_size + plan.layout.num_devices)

    def values(self, requests: Sequence[int], wait_seconds: float) -> list[float]:
        """The report of one step.

        requests: what this rank was asked, in the order of events.REQUESTS.
        wait_seconds: how long it waited for data.
        """
        values, num_ranks = self._values, self._world_size
        values[self._rank] = wait_seconds
        values[num_ranks + self._rank] = self.forward_seconds
        for device, peak in zip(self._own_devices, self._peak_memory.report(), strict=True):
            values[2 * num_ranks + device] = peak
        return [*requests, *values]


class PeakMemory:
    """Peak bytes of each device, for the report of every step.

    A GPU's allocator is asked in the first steps, whose peak grows, then in every 16th: torch
    copies all its statistics for one of them, which takes some 80 us a device. A peak never falls,
    so what a step in between reports is at most 15 steps old.
    """

    _FIRST, _EVERY = 4, 16

    def __init__(
        self, devices: Sequence[torch.device], read: Callable[[torch.device], int] | None = None
    ) -> None:
        """read: the peak bytes of one device; None: peak_memory_bytes."""
        self._devices, self._read = devices, read or peak_memory_bytes
        self._reports = 0
        self._peaks: list[int] = []

    def report(self) -> list[int]:
        """The peaks by device, as they were last read."""
        if self._reports < self._FIRST or self._reports % self._EVERY == 0:
            self._peaks = [self._read(device) for device in self._devices]
        self._reports += 1
        return self._peaks


def peak_memory_bytes(device: torch.device) -> int:
    """Peak bytes: allocated on the GPU, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
