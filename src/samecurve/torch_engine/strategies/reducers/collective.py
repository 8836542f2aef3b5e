"""The reducer of the library's all-reduce, which adds in an order of its own.

Each process adds up the gradients of its microbatches in place. The last backward pass completes
bucket after bucket, and each is summed over the ranks while the pass still runs.
"""

from collections.abc import Callable, Sequence

from torch import nn

from samecurve.core.feature_list import hooks_of
from samecurve.core.planning.plan import Plan
from samecurve.core.protocols import MicroBatch
from samecurve.torch_engine.process_group import Comm
from samecurve.torch_engine.strategies.reducers import Reducer, clear
from samecurve.torch_engine.strategies.reducers.buckets import (
    Bucket,
    GradientQueue,
    cut_into_buckets,
    versions,
)

# starts to sum a bucket of this number, whose memory is given; the result waits for the sum
StartSum = Callable[[int, Bucket], Callable[[], object]]


class Collective(Reducer):
    """Sums gradients over ranks, each of which has one device.

    With gradient accumulation the gradients lie in the buckets from the start: beside them they
    would take the memory of a whole model once more.
    """

    def __init__(self, plan: Plan, comm: Comm, replicas: Sequence[Sequence[nn.Parameter]]) -> None:
        super().__init__(plan, comm, replicas)
        (self._parameters,) = replicas
        cuts = cut_into_buckets(self._parameters)
        self._buckets = [Bucket(self._parameters[cut]) for cut in cuts]
        self._in_buckets = plan.batch.accumulation_steps > 1
        self._start_sum = _sum_of(plan, comm, len(cuts))
        parameters = [bucket.parameters for bucket in self._buckets]
        self._queue = GradientQueue(parameters, self._send, in_tree=False)
        self._waits: list[Callable[[], object]] = []
        self._with_gradient: set[int] = set()  # ids of parameters with a gradient of this step

    def begin_step(self, _num_microbatches: int) -> None:
        self._queue.begin_step()
        self._with_gradient.clear()
        if self._in_buckets:
            for bucket in self._buckets:
                bucket.piece()[0].zero_()
                bucket.set_gradients()
        else:
            clear(self._parameters)
        self._begun = [versions(bucket.parameters) for bucket in self._buckets]

    def begin_microbatch(self, _index: int, _microbatch: MicroBatch, *, is_last: bool) -> None:
        self._queue.begin_pass(is_last=is_last)

    def end_microbatch(self, _index: int) -> None:
        self._queue.end_pass()

    def _send(self, number: int) -> None:
        bucket = self._buckets[number]
        numbers = zip(versions(bucket.parameters), self._begun[number], strict=True)
        for parameter, (now, begun) in zip(bucket.parameters, numbers, strict=True):
            if now != begun:
                self._with_gradient.add(id(parameter))
        if not self._in_buckets:
            bucket.filled([parameter.grad for parameter in bucket.parameters])
            clear(bucket.parameters)
        self._waits.append(self._start_sum(number, bucket))

    def reduce(self) -> None:
        self._queue.send_rest()
        for wait in self._waits:
            wait()
        self._waits.clear()
        if not self._in_buckets:
            for bucket in self._buckets:
                bucket.set_gradients()

    def has_gradient(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._with_gradient

    def close(self) -> None:
        self._queue.close()


def _sum_of(plan: Plan, comm: Comm, num_buckets: int) -> StartSum:
    """How a bucket is summed: as a feature of the run does it, else as it is."""
    for _, hooks, value in hooks_of(plan.features, "sum"):
        start: StartSum = hooks(comm, num_buckets, value).start
        return start
    return lambda _number, bucket: comm.all_reduce(bucket.piece()[0])
