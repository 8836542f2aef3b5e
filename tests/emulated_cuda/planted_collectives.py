"""Planted faults of several ranks: collectives, and what they send ."""

import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from faults_and_runs import Replace, planted, side_stream

from samecurve.torch_engine.process_group import Comm
from samecurve.torch_engine.strategies.reducers.buckets import Bucket


def collective_of(
    reduce: Callable[[torch.Tensor, dist.ProcessGroup], Any],
) -> Callable[[Comm, torch.Tensor], Callable[[], torch.Tensor]]:
    """Comm.all_reduce() with another collective in the place of torch's all_reduce."""

    def all_reduce(self: Comm, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        assert self.group is not None
        reduce(values, self.group)
        return lambda: values

    return all_reduce


@planted("race", "ddp")
def sum_read_before_it_arrives(replace: Replace) -> None:
    """A collective whose end nobody waits for."""

    def reduce(values: torch.Tensor, group: dist.ProcessGroup) -> None:
        dist.all_reduce(values, group=group, async_op=True)  # fault: sum_read_before_it_arrives

    replace(Comm, "all_reduce", collective_of(reduce))


@planted("race", "exact ddp")
def gradients_sent_before_they_are_there(replace: Replace) -> None:
    """The tree's reducer, with the copies of gradients on a stream of their own."""
    filled = Bucket.filled

    def filled_beside(self: Any, gradients: Any, number: int) -> torch.Tensor:
        side_stream().wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side_stream()):
            return filled(  # fault: gradients_sent_before_they_are_there
                self, gradients, number
            )

    replace(Bucket, "filled", filled_beside)


@planted("failed", "ddp")
def collective_of_a_transposed_tensor(replace: Replace) -> None:
    def reduce(values: torch.Tensor, group: dist.ProcessGroup) -> None:
        table = torch.stack([values, values]).t()
        dist.all_reduce(table, group=group)  # fault: collective_of_a_transposed_tensor

    replace(Comm, "all_reduce", collective_of(reduce))


@planted("failed", "ddp")
def collective_of_a_type_that_nccl_has_not(replace: Replace) -> None:
    def reduce(values: torch.Tensor, group: dist.ProcessGroup) -> None:
        small = values.to(torch.int16)
        dist.all_reduce(small, group=group)  # fault: collective_of_a_type_that_nccl_has_not

    replace(Comm, "all_reduce", collective_of(reduce))


@planted("device", "ddp")
def collective_of_a_cpu_tensor(replace: Replace) -> None:
    def reduce(values: torch.Tensor, group: dist.ProcessGroup) -> None:
        dist.all_reduce(values.cpu(), group=group)  # fault: collective_of_a_cpu_tensor

    replace(Comm, "all_reduce", collective_of(reduce))


@planted("failed", "exact ddp")
def parts_that_do_not_make_the_whole(replace: Replace) -> None:
    """An all_to_all whose splits don't add up."""
    exchange = dist.all_to_all_single

    def exchange_less(out: Any, sent: Any, receives: Any, sends: Any, **options: Any) -> Any:
        sends = [sends[0] - 1, *sends[1:]]
        return exchange(  # fault: parts_that_do_not_make_the_whole
            out, sent, receives, sends, **options
        )

    replace(dist, "all_to_all_single", exchange_less)


@planted("collective", "exact ddp")
def parts_of_other_sizes_than_expected(replace: Replace) -> None:
    """An all_to_all whose splits add up on each rank, and differ between the ranks."""
    exchange = dist.all_to_all_single

    def exchange_other(out: Any, sent: Any, receives: Any, sends: Any, **options: Any) -> Any:
        sends = [sends[0] - 1, sends[1] + 1, *sends[2:]]
        return exchange(  # fault: parts_of_other_sizes_than_expected
            out, sent, receives, sends, **options
        )

    replace(dist, "all_to_all_single", exchange_other)


@planted("collective", "ddp")
def ranks_call_in_another_order(replace: Replace) -> None:
    """One rank adds up something more."""

    def reduce(values: torch.Tensor, group: dist.ProcessGroup) -> None:
        if dist.get_rank(group) == 1:
            more = torch.zeros(7, device=values.device)
            dist.all_reduce(more, group=group)  # fault: ranks_call_in_another_order
        dist.all_reduce(values, group=group)

    replace(Comm, "all_reduce", collective_of(reduce))


@planted("collective", "ddp")
def groups_called_in_another_order(replace: Replace) -> None:
    """Two groups of the same ranks, which one rank calls the other way round."""
    second = dist.new_group([0, 1], backend="nccl")

    def reduce(values: torch.Tensor, group: dist.ProcessGroup) -> None:
        groups = [group, second]
        if dist.get_rank(group) == 1:
            groups.reverse()
        parts = [values, values.clone()]
        works = [
            dist.all_reduce(  # fault: groups_called_in_another_order
                part, group=one, async_op=True
            )
            for one, part in zip(groups, parts, strict=True)
        ]
        for work in works:
            work.wait()

    replace(Comm, "all_reduce", collective_of(reduce))


@planted("hang", "ddp")
def rank_leaves_before_a_collective(replace: Replace) -> None:
    def reduce(values: torch.Tensor, group: dist.ProcessGroup) -> None:
        if dist.get_rank(group) == 1:
            dist.destroy_process_group(group)
            time.sleep(3)  # the pool ends all ranks as soon as one has gone
            os._exit(0)
        dist.all_reduce(values, group=group)  # fault: rank_leaves_before_a_collective

    replace(Comm, "all_reduce", collective_of(reduce))


@planted("failed", "ddp")
def two_ranks_on_one_gpu(replace: Replace) -> None:
    """Ranks that never call set_device(): "cuda" is the first GPU on all of them."""
    fresh = dist.new_group([0, 1], backend="nccl")

    def broadcast(_self: Comm, tensors: Iterable[torch.Tensor], *_: Any, root: int = 0) -> None:
        for tensor in tensors:
            sent = tensor.to("cuda:0")
            dist.broadcast(sent, group=fresh, group_src=root)  # fault: two_ranks_on_one_gpu
            tensor.copy_(sent)

    replace(Comm, "broadcast", broadcast)
