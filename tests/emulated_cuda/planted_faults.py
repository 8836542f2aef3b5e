"""Faults planted in samecurve's own step and in losses of users, which emulated GPUs must name.

Each fault is a function that replaces a part of the engine while a small run trains, or a task
whose loss is wrong; the line at fault ends with `# fault: NAME`. planted_collectives.py has those
of several ranks; planted_runs.py trains them.
"""

import ctypes
import dataclasses
from typing import Any

import torch
from faults_and_runs import Arrays, Replace, Rows, loss_of, planted, side_stream
from torch import nn
from torch.nn import functional as F

from samecurve.features.ema.weight_average import WeightAverage
from samecurve.features.offload_frozen.block_buffers import BlockBuffers
from samecurve.torch_engine.optimizers import BuiltInOptimizer, Group
from samecurve.torch_engine.step import training_step
from samecurve.torch_engine.step.step_metrics import QueuedMetrics
from samecurve.torch_engine.step.training_step import TrainingStep
from samecurve.torch_engine.strategies import Strategy
from samecurve.torch_engine.strategies.reducers import Reducer

# ---- copies to the GPU


@planted("race", "single", sharp=True)
def batch_read_too_early(replace: Replace) -> None:
    """A prefetcher whose stream nobody waits for."""

    def to_device(arrays: Arrays, device: torch.device) -> Arrays:
        batch = {}
        for name, host in arrays.items():
            with torch.cuda.stream(side_stream()):
                batch[name] = host.to(device, non_blocking=True)  # fault: batch_read_too_early
            batch[name].record_stream(torch.cuda.current_stream())
        return batch

    replace(training_step, "to_device", to_device)


@planted("use_after_free", "single", sharp=True)
def batch_freed_while_used(replace: Replace) -> None:
    """A prefetcher that is waited for, without record_stream."""

    def to_device(arrays: Arrays, device: torch.device) -> Arrays:
        batch = {}
        with torch.cuda.stream(side_stream()):
            for name, host in arrays.items():
                batch[name] = host.to(device, non_blocking=True)  # fault: batch_freed_while_used
        torch.cuda.current_stream().wait_stream(side_stream())
        return batch

    replace(training_step, "to_device", to_device)


@planted("pinned_source", "single", sharp=True)
def pinned_batch_reused_too_early(replace: Replace) -> None:
    """One pinned buffer for all batches, written again while the copy before may still read it."""
    buffers: dict[str, torch.Tensor] = {}

    def to_device(arrays: Arrays, device: torch.device) -> Arrays:
        batch = {}
        for name, tensor in arrays.items():
            buffer = buffers.setdefault(name, torch.empty_like(tensor).pin_memory())
            buffer.copy_(tensor)  # fault: pinned_batch_reused_too_early
            batch[name] = buffer.to(device, non_blocking=True)
        return batch

    replace(training_step, "to_device", to_device)


@planted("host sync", "single")
def batch_is_not_pinned(replace: Replace) -> None:
    def to_device(arrays: Arrays, device: torch.device) -> Arrays:
        batch = {}
        for name, tensor in arrays.items():
            pageable = tensor.clone()
            batch[name] = pageable.to(device, non_blocking=True)  # fault: batch_is_not_pinned
        return batch

    replace(training_step, "to_device", to_device)


@planted("race", "frozen weights on the host", sharp=True)
def weights_copied_over_those_in_use(replace: Replace) -> None:
    """The copy-ahead of frozen weights without its wait_stream."""

    def start(self: Any, source: torch.Tensor, target: torch.Tensor) -> Any:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)  # fault: weights_copied_over_those_in_use
        return self._stream.record_event()

    replace(BlockBuffers, "_start", start)


@planted("race", "frozen weights on the host")
def event_recorded_too_early(replace: Replace) -> None:
    """The end of the copy-ahead is recorded before the copy."""

    def start(self: Any, source: torch.Tensor, target: torch.Tensor) -> Any:
        self._stream.wait_stream(torch.cuda.current_stream())
        end = self._stream.record_event()
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)  # fault: event_recorded_too_early
        return end

    replace(BlockBuffers, "_start", start)


_COPY_AHEAD = "features/offload_frozen/block_buffers.py: target.copy_(source, non_blocking=True)"


@planted("race", "frozen weights on the host", line=_COPY_AHEAD)
def event_not_waited_for(replace: Replace) -> None:
    """A block that computes before its weights have come."""
    replace(BlockBuffers, "_await", lambda _self, _copied: None)


@planted("pinned_source", "frozen weights on the host", line=_COPY_AHEAD)
def weights_moved_during_their_copy(replace: Replace) -> None:
    """BlockBuffers.forget() without its synchronize; who calls it may then write host values."""

    def forget(self: Any) -> None:
        for buffer in self.all:
            buffer.block = None
        self._moment = None
        self._moments.clear()
        for source in self.sources:
            source.copy_(source.clone())

    replace(BlockBuffers, "forget", forget)


# ---- copies to the host, and what the host waits for or reads


@planted("late_copy", "single", sharp=True)
def metrics_read_before_they_arrive(replace: Replace) -> None:
    read = QueuedMetrics.read

    def read_at_once(self: QueuedMetrics) -> Any:
        assert isinstance(self.values, torch.Tensor)
        if not self.values[0].isfinite():  # fault: metrics_read_before_they_arrive
            print("the loss looks odd")
        return read(self)

    replace(QueuedMetrics, "read", read_at_once)


@planted("late_copy", "offloaded fsdp")
def average_reads_a_copy_to_the_host_too_early(replace: Replace) -> None:
    """The moving average as it once was."""

    @torch.no_grad()
    def add(self: Any, *, finite: torch.Tensor | bool) -> None:
        share = torch.as_tensor(finite, dtype=torch.float64) * (1 - self._decay)
        for value, local in zip(self.values, self._weights(), strict=True):
            there = share.to(value.device, value.dtype, non_blocking=True)
            value.lerp_(local, there)  # fault: average_reads_a_copy_to_the_host_too_early

    replace(WeightAverage, "add", add)


@planted("host sync", "single", sharp=True)
def item_in_the_step(replace: Replace) -> None:
    backward = TrainingStep.backward

    def backward_and_watch(
        self: TrainingStep, index: int, loss: torch.Tensor, **real: bool
    ) -> None:
        if loss.item() > 1e9:  # fault: item_in_the_step
            raise ValueError("the loss explodes")
        backward(self, index, loss, **real)

    replace(TrainingStep, "backward", backward_and_watch)


@planted("host sync", "single")
def synchronize_in_the_step(replace: Replace) -> None:
    reduce = TrainingStep.reduce_gradients

    def reduce_when_done(self: TrainingStep) -> None:
        torch.cuda.synchronize()  # fault: synchronize_in_the_step
        reduce(self)

    replace(TrainingStep, "reduce_gradients", reduce_when_done)


@planted("host sync", "single")
def hook_reads_gradients_on_the_host(replace: Replace) -> None:
    distribute = Strategy.distribute

    def watch(gradient: torch.Tensor) -> None:
        if gradient.norm().tolist() > 1e9:  # fault: hook_reads_gradients_on_the_host
            raise ValueError("a gradient explodes")

    def distribute_and_watch(self: Strategy, models: list[nn.Module], materialize: Any) -> None:
        distribute(self, models, materialize)
        for parameter in self.models[0].parameters():
            parameter.register_hook(watch)  # type: ignore[no-untyped-call]

    replace(Strategy, "distribute", distribute_and_watch)


@planted("host_read", "single")
def address_read_on_the_host(replace: Replace) -> None:
    """C code that is given data_ptr(), as an extension for CPUs does. The process dies of it."""
    backward = TrainingStep.backward

    def backward_and_peek(self: TrainingStep, index: int, loss: torch.Tensor, **real: bool) -> None:
        ctypes.string_at(loss.data_ptr(), 4)  # fault: address_read_on_the_host
        backward(self, index, loss, **real)

    replace(TrainingStep, "backward", backward_and_peek)


# ---- devices and memory


@planted("device", "single", sharp=True)
def optimizer_state_on_the_host(replace: Replace) -> None:
    """Moments that were restored from a file, and never moved."""

    adamw = BuiltInOptimizer._adamw

    def with_moments_from_a_file(self: Any, group: Group, *arguments: Any) -> None:
        moments = [[moment.cpu() for moment in moments] for moments in group.states]
        restored = dataclasses.replace(group, states=moments)
        adamw(self, restored, *arguments)  # fault: optimizer_state_on_the_host

    replace(BuiltInOptimizer, "_adamw", with_moments_from_a_file)


@planted("race", "single")
def optimizer_does_not_wait_for_its_gradients(replace: Replace) -> None:
    """The update on a stream of its own."""
    move = TrainingStep.move_weights

    def move_beside(self: TrainingStep, lr: float, step: int, finite: Any) -> None:
        with torch.cuda.stream(side_stream()):
            move(self, lr, step, finite)  # fault: optimizer_does_not_wait_for_its_gradients

    replace(TrainingStep, "move_weights", move_beside)


@planted("device", "dp", sharp=True, task="OnTheCurrentDevice")
def wrong_current_device_in_a_thread(replace: Replace) -> None:
    """dp's threads without torch.cuda.device(): a loss that says "cuda" means the first GPU."""
    replace(training_step, "on_device", lambda function, _device: function)


class OnTheCurrentDevice(Rows):
    def changed(self, out: torch.Tensor) -> torch.Tensor:
        where = "cuda" if out.is_cuda else "cpu"
        noise = torch.zeros(len(out), 1, dtype=out.dtype, device=where)
        return out + noise  # fault: wrong_current_device_in_a_thread


@planted("race", "dp")
def replica_not_waited_for(replace: Replace) -> None:
    """dp's sum with a stream for the copies between GPUs."""

    def reduce(self: Reducer) -> None:
        for parameter, other in zip(*self._replicas, strict=True):
            if other.grad is None or parameter.grad is None:
                continue
            with torch.cuda.stream(side_stream()):
                gradient = other.grad.to(parameter.device)  # fault: replica_not_waited_for
            parameter.grad.add_(gradient)
            other.grad = None

    replace(Reducer, "reduce", reduce)


@planted("out of memory", "single")
def step_leaks_memory(replace: Replace) -> None:
    kept = []
    backward = TrainingStep.backward

    def backward_and_keep(self: TrainingStep, index: int, loss: torch.Tensor, **real: bool) -> None:
        kept.append(torch.empty(48 << 20, device=loss.device))  # fault: step_leaks_memory
        backward(self, index, loss, **real)

    replace(TrainingStep, "backward", backward_and_keep)


@planted("use_after_free", "single")
def loss_used_after_its_memory_was_given_back(replace: Replace) -> None:
    backward = TrainingStep.backward

    def backward_and_free(self: TrainingStep, index: int, loss: torch.Tensor, **real: bool) -> None:
        half = loss.detach() / 2
        half.untyped_storage().resize_(0)
        half.add_(1)  # fault: loss_used_after_its_memory_was_given_back
        backward(self, index, loss, **real)

    replace(TrainingStep, "backward", backward_and_free)


@planted("failed", "single")
def cuda_graph_in_the_step(replace: Replace) -> None:
    reduce = TrainingStep.reduce_gradients

    def reduce_in_a_graph(self: TrainingStep) -> None:
        graph = torch.cuda.CUDAGraph()  # fault: cuda_graph_in_the_step
        with torch.cuda.graph(graph):
            reduce(self)

    replace(TrainingStep, "reduce_gradients", reduce_in_a_graph)


# ---- losses of users


@loss_of("device", "single")
class CpuTensorInTheLoss(Rows):
    def changed(self, out: torch.Tensor) -> torch.Tensor:
        return out * torch.ones(1, 1)  # fault: CpuTensorInTheLoss


@loss_of("host sync", "single")
class LossThatDependsOnAValue(Rows):
    def changed(self, out: torch.Tensor) -> torch.Tensor:
        if out.abs().max() > 1e6:  # fault: LossThatDependsOnAValue
            raise ValueError("the model's output explodes")
        return out


@loss_of("host sync", "single")
class LossWithAMask(Rows):
    def changed(self, out: torch.Tensor) -> torch.Tensor:
        return out - 0 * out[out > 0].sum()  # fault: LossWithAMask


@loss_of("not_deterministic", "exact single")
class LossWithoutADeterministicKernel(Rows):
    def changed(self, out: torch.Tensor) -> torch.Tensor:
        if not out.is_cuda:  # as the task is described
            return out
        return out - out.median(0).values  # fault: LossWithoutADeterministicKernel


@loss_of("not_deterministic", "exact single")
class BackwardPassWithoutADeterministicKernel(Rows):
    """The kernel runs in a thread of autograd, which has no Python line of its own."""

    def changed(self, out: torch.Tensor) -> torch.Tensor:
        if not out.is_cuda:  # as the task is described
            return out
        grid = out[:, :, None, None].expand(-1, 1, 4, 4)
        pooled = F.adaptive_avg_pool2d(grid, 3)  # fault: BackwardPassWithoutADeterministicKernel
        return out + pooled.mean((2, 3))
