"""What a strategy is: how a model lies on devices, and how gradients are summed over them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

import torch
from torch import nn

from samecurve.core.protocols import MicroBatch
from samecurve.torch_engine.model.batch_norm import Peers
from samecurve.torch_engine.optimizers.optimizer_params import OptimizerParam

T = TypeVar("T")
MatrixFunction = Callable[[torch.Tensor], torch.Tensor]  # a matrix, or a stack -> one of its shape
Materialize = Callable[[nn.Module], None]  # makes the parameters of a part real


class Strategy(Protocol):
    # One for each device of this process, as the task made them; the first holds the weights and,
    # after reduce(), the gradients. What a task does with one goes through train() or call().
    models: list[nn.Module]

    def peers(self) -> Sequence[Peers]:
        """For each device of this process, what adds up values over all devices."""
        ...

    def distribute(self, models: list[nn.Module], materialize: Materialize) -> None:
        """Lay out the first of `models`, part by part; the others are for the other devices of this
        process.
        """
        ...

    def train(self, device_index: int, function: Callable[..., T], *arguments: object) -> T:
        """function(model, *arguments), whose result backward() will be called of, within
        accumulation_round().

        device_index: which of this process's devices
        """
        ...

    def call(self, device_index: int, function: Callable[..., T], *arguments: object) -> T:
        """function(model, *arguments), outside of training; where weights are sharded all ranks
        call it together.
        """
        ...

    def run_jobs(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """One job for each device of this process."""
        ...

    def begin_step(self, parameters: Sequence[nn.Parameter], num_microbatches: int) -> None:
        """Before a step: no gradient is left. num_microbatches: over all devices."""
        ...

    def accumulation_round(
        self, device_index: int, microbatch: MicroBatch, *, is_last: bool
    ) -> AbstractContextManager[object]:
        """Around forward and backward of one microbatch.

        device_index: which of this process's devices
        is_last: of that device's microbatches in this step
        """
        ...

    def params_with_grad(self) -> set[str]:
        """After reduce(): parameters to which the loss of this process's microbatches gave a
        gradient.
        """
        ...

    def reduce(self, parameters: Sequence[nn.Parameter]) -> None:
        """After the last round: leave the sum over all devices in the first replica's gradients."""
        ...

    def norm(self, trained: Iterable[OptimizerParam]) -> torch.Tensor:
        """The norm of the whole gradient, from what this process's views of parameters have of it
        (all have one); float64, the same on every rank.
        """
        ...

    def sum_over_parts(
        self, params: Sequence[OptimizerParam], values: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """What each parameter's whole gives, of what this process's part of it gave: the sums, over
        the processes that hold the other parts.

        values: a vector for each of the parameters; float64, on the device of its view
        """
        ...

    def map_whole(
        self,
        params: Sequence[OptimizerParam],
        matrices: Sequence[torch.Tensor],
        function: MatrixFunction,
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """(number, this process's part of function(whole matrix)) of each, in any order; the whole
        is computed by one of the processes that have copies or parts of it.

        matrices: this process's parts, which lie as the parameters' views do
        """
        ...

    def change(self, function: Callable[..., None], *arguments: object) -> None:
        """function(model, *arguments), which may change weights and buffers; every process calls
        it alike, sync_replicas() follows.
        """
        ...

    def reset(self) -> None:
        """Before the first step: what trials have gathered or learnt is let go of."""
        ...

    def sync_replicas(self) -> None:
        """After an update, or change(): give the other replicas of this process the new weights."""
        ...

    def local_shard(self, tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(shape of the whole, where this process's part of it begins)."""
        ...

    def replica_index(self, tensor: torch.Tensor) -> tuple[int, int]:
        """(which, of how many) processes hold the same part of it as this one."""
        ...

    def close(self) -> None: ...
