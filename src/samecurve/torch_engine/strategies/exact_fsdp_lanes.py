"""train.exact under fsdp and hsdp on CPU ranks that compute several microbatches side by side.

A step gathers all weights before its microbatches, and each lane has a bare replica of the model
that shares their memory; the first lane computes with the sharded model itself, whose hooks do
nothing meanwhile. So lanes need no other rank until all have ended. Each lane adds its own part of
the step's tree, and these parts are added up before the owners of shards get theirs.

What is computed one after the other (trials, evaluations, the sentinel) gathers weights as ever.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from samecurve.core.planning.plan import Plan
from samecurve.core.protocols import MicroBatch
from samecurve.torch_engine.model.model_setup import Materializer
from samecurve.torch_engine.process_group import Comm
from samecurve.torch_engine.strategies.base import Materialize
from samecurve.torch_engine.strategies.dp import share_buffers
from samecurve.torch_engine.strategies.exact import note_gradient
from samecurve.torch_engine.strategies.exact_fsdp_once import ExactFSDPOnce
from samecurve.torch_engine.strategies.exact_own_sums import Lane
from samecurve.torch_engine.strategies.fsdp_groups import all_groups, gathered_at_once
from samecurve.torch_engine.strategies.group_gradients import trains
from samecurve.torch_engine.strategies.threads import ThreadTeam

T = TypeVar("T")


class ExactFSDPLanes(ExactFSDPOnce):
    """The exact form of fsdp and hsdp whose ranks compute several microbatches side by side."""

    def __init__(self, plan: Plan, comm: Comm, devices: Sequence[torch.device]) -> None:
        super().__init__(plan, comm, devices)
        self._team = ThreadTeam(len(devices))
        self._is_side_by_side = False  # whether the microbatches of the step in work are
        self._lanes: list[Lane] = []

    def close(self) -> None:
        super().close()
        self._team.close()

    def distribute(self, models: list[nn.Module], materialize: Materialize) -> None:
        first, *replicas = models
        super().distribute([first], materialize)
        self.models += replicas
        self._groups = all_groups(self._root)
        of_groups = [[one.sharded_param for one in group.fsdp_params] for group in self._groups]
        self._names_of_sums = [
            [self._names[id(weight)] for weight in weights] for weights in (*of_groups, self._whole)
        ]
        self._lanes = [self._lane]
        unsharded = [one for one in first.parameters() if not isinstance(one, DTensor)]
        for replica in replicas:
            Materializer(replica, self._device)(replica)
            share_buffers(first, replica)
            self._lanes.append(self._lane_of(replica))
        self._unsharded = [(one, self._in_replicas(one)) for one in unsharded]
        self._sharded = [
            (param, self._in_replicas(param.sharded_param))
            for group in self._groups
            for param in group.fsdp_params
        ]
        with self._all_whole():  # the replicas have their memory from here on
            pass

    def _lane_of(self, replica: nn.Module) -> Lane:
        weights, fired = dict(replica.named_parameters()), set[int]()
        sums = [
            own.of_lane([weights[name] for name in names])
            for names, own in zip(self._names_of_sums, self._lane.sums, strict=True)
        ]
        for weight in filter(lambda one: one.requires_grad, weights.values()):
            hook = partial(note_gradient, fired)
            weight.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        return Lane(sums, fired)

    def _in_replicas(self, parameter: nn.Parameter) -> list[nn.Parameter]:
        """The weights of all replicas that are a parameter of the sharded model."""
        name = self._names[id(parameter)]
        return [replica.get_parameter(name) for replica in self.models[1:]]

    @contextmanager
    def _all_whole(self) -> Iterator[None]:
        """All weights are whole, in the sharded model and in the replicas."""
        self._order.finish()
        with gathered_at_once(self._root, self._groups):
            self._watch_gathered()
            whole = [(param.unsharded_param, own) for param, own in self._sharded]
            for parameter, of_replicas in (*whole, *self._unsharded):
                for weight in of_replicas:
                    weight.data = parameter.data
            yield

    def run_jobs(self, jobs: Sequence[Callable[..., T]], *arguments: object) -> list[T]:
        """Call the only job; or one for each lane, side by side, with all weights gathered."""
        if len(jobs) == 1:
            return super().run_jobs(jobs, *arguments)
        with self._all_whole():
            self._is_side_by_side = True
            return self._team.run([partial(job, *arguments) for job in jobs])

    def begin_step(self, parameters: Sequence[nn.Parameter], num_microbatches: int) -> None:
        super().begin_step(parameters, num_microbatches)
        self._is_side_by_side = False
        for lane in self._lanes[1:]:
            lane.begin_step(num_microbatches)

    def begin_microbatch(self, index: int, microbatch: MicroBatch, *, is_last: bool) -> None:
        if self._is_side_by_side:
            self._lanes[index].begin_microbatch(microbatch.number)
        else:
            super().begin_microbatch(index, microbatch, is_last=is_last)

    def train(self, device_index: int, function: Callable[..., T], *arguments: object) -> T:
        if self._is_side_by_side:
            return function(self.models[device_index], *arguments)
        return super().train(device_index, function, *arguments)

    def end_microbatch(self, device_index: int, microbatch: MicroBatch) -> None:
        if self._is_side_by_side:
            self._lanes[device_index].end_microbatch()
        else:
            super().end_microbatch(device_index, microbatch)

    def _called_groups(self) -> list[Any]:
        """Every group of trained weights: other ranks may have called what this one has not."""
        if not self._is_side_by_side:
            return super()._called_groups()
        return [*filter(trains, self._groups)]

    @torch.no_grad()
    def reduce(self, parameters: Sequence[nn.Parameter]) -> None:
        if self._is_side_by_side:
            first, *others = self._lanes
            for lane in others:
                first.take_over(lane)
            for names, own in zip(self._names_of_sums, first.sums, strict=True):
                self._order.gradients.used |= own.names_with_gradient(names)
        super().reduce(parameters)
        self._is_side_by_side = False

    def reset(self) -> None:
        super().reset()
        self._is_side_by_side = False

    def leaves(self, device_index: int) -> dict[str, nn.Parameter]:
        if device_index == 0:
            return super().leaves(device_index)
        named = self.models[device_index].named_parameters()
        return {name: weight for name, weight in named if weight.requires_grad}
