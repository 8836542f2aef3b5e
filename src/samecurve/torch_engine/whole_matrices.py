"""Work on whole matrices, divided over processes that have copies or parts of them.

One process computes each matrix. The matrices are taken in batches of some megabytes, the costliest
first, so that every process has about as much to do, and few matrices are whole at the same time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist

from samecurve.core.planning.plan import Plan
from samecurve.torch_engine.process_group import Comm

Shape = Sequence[int]
MatrixFunction = Callable[[torch.Tensor], torch.Tensor]  # a matrix, or a stack -> one of its shape
# most numbers of a batch that has a matrix for each process
_COPIES = 1 << 27  # where each process gets all results
_SHARDS = 1 << 25  # times the number of processes, where each process has its own matrices whole


def cost(shape: Shape) -> int:
    """The cost of products of a matrix, or of a stack of them, with itself, in any unit."""
    return prod(shape) * min(shape[-2:])


def shared_out(shapes: Sequence[Shape], world_size: int, most: int) -> Iterator[list[list[int]]]:
    """The matrices that are computed together, by the process that computes each.

    At least one for each process, and beyond that at most `most` numbers. Costliest first, each
    matrix goes to the process that has the least to do so far.
    """
    costs = [cost(shape) for shape in shapes]
    load = [0] * world_size
    by_owner: list[list[int]] = [[] for _ in load]
    count = size = 0
    for number in sorted(range(len(shapes)), key=lambda number: (-costs[number], number)):
        if count >= world_size and size + prod(shapes[number]) > most:
            yield by_owner
            load, by_owner = [0] * world_size, [[] for _ in load]
            count = size = 0
        owner = load.index(min(load))
        by_owner[owner].append(number)
        load[owner] += costs[number]
        count += 1
        size += prod(shapes[number])
    if count:
        yield by_owner


def meeting_place(plan: Plan, device: torch.device) -> torch.device:
    """The device on which a plan's collectives exchange tensors of this device."""
    return torch.device("cpu") if plan.layout.backend == "gloo" else device


def map_copies(
    comm: Comm, matrices: Sequence[torch.Tensor], function: MatrixFunction, *, meet: torch.device
) -> Iterator[tuple[int, torch.Tensor]]:
    """For each matrix its number and function(matrix), on every process.

    matrices: the same on all processes
    meet: the device on which this group's collectives run
    """
    for by_owner in shared_out([one.shape for one in matrices], comm.world_size, _COPIES):
        results = [function(matrices[number]) for number in by_owner[comm.rank]]
        sends = []
        for rank, numbers in enumerate(by_owner):
            size = sum(matrices[number].numel() for number in numbers)
            if not size:
                continue
            if rank == comm.rank:
                flat = _side_by_side(results, meet)
            else:
                flat = torch.empty(size, dtype=matrices[0].dtype, device=meet)
            work = dist.broadcast(flat, group=comm.group, group_src=rank, async_op=True)
            sends.append((work, flat, numbers))
        for work, flat, numbers in sends:
            work.wait()
            own = flat.to(matrices[0].device)
            parts = torch.split(own, [matrices[number].numel() for number in numbers])
            for number, part in zip(numbers, parts, strict=True):
                yield number, part.view(matrices[number].shape)


@dataclass(frozen=True)
class Shard:
    """This process's rows of a matrix."""

    rows: torch.Tensor
    shape: tuple[int, ...]  # of the whole

    def rows_of(self, rank: int, world_size: int) -> int:
        """The rows of a shard as a weight is cut: equal pieces, the last ones shorter or
        empty.
        """
        piece = -(-self.shape[0] // world_size)
        return max(0, min(piece, self.shape[0] - rank * piece))

    def size_of(self, rank: int, world_size: int) -> int:
        return self.rows_of(rank, world_size) * prod(self.shape[1:])


def map_shards(
    comm: Comm,
    shards: Sequence[Shard],
    function: MatrixFunction,
    *,
    device: torch.device,
    meet: torch.device,
) -> Iterator[tuple[int, torch.Tensor]]:
    """For each matrix its number and this process's rows of function(whole matrix).

    device: where the function computes
    meet: the device on which this group's collectives run
    """
    most = _SHARDS * comm.world_size
    for numbers in shared_out([shard.shape for shard in shards], comm.world_size, most):
        by_owner = [[shards[number] for number in of_rank] for of_rank in numbers]
        wholes = _gathered(comm, by_owner, meet)
        results = [function(whole.to(device)) for whole in wholes]
        parts = _cut_again(comm, by_owner, results, meet)
        for of_rank, parts_of_rank in zip(numbers, parts, strict=True):
            for number, part in zip(of_rank, parts_of_rank, strict=True):
                yield number, part.to(shards[number].rows.device)


def gathered_whole(
    comm: Comm, shards: Sequence[tuple[torch.Tensor, Shape]], *, meet: torch.device
) -> Iterator[tuple[int, torch.Tensor]]:
    """The arrays that this process puts together of all processes' rows: number, and the whole.

    shards: for each array, of any number format, this process's rows and the shape of the whole
    meet: the device on which this group's collectives run
    """
    in_bytes = [Shard(*_as_bytes(rows, shape)) for rows, shape in shards]
    most = _SHARDS * comm.world_size
    for numbers in shared_out([shard.shape for shard in in_bytes], comm.world_size, most):
        by_owner = [[in_bytes[number] for number in of_rank] for of_rank in numbers]
        wholes = _gathered(comm, by_owner, meet)
        for number, whole in zip(numbers[comm.rank], wholes, strict=True):
            rows, shape = shards[number]
            yield number, whole.reshape(-1).view(rows.dtype).view(*shape)


def _as_bytes(rows: torch.Tensor, shape: Shape) -> tuple[torch.Tensor, tuple[int, int]]:
    """Rows of an array as bytes, and the shape of the whole array as bytes."""
    row_bytes = prod(shape[1:]) * rows.itemsize
    flat = rows.contiguous().view(-1).view(torch.uint8)
    return flat.view(rows.shape[0], row_bytes), (shape[0], row_bytes)


def _gathered(
    comm: Comm, by_owner: Sequence[Sequence[Shard]], meet: torch.device
) -> list[torch.Tensor]:
    """The matrices of this process, whole."""
    world_size, own = comm.world_size, by_owner[comm.rank]
    sent = _side_by_side([shard.rows for shards in by_owner for shard in shards], meet)
    sent_sizes = [sum(shard.rows.numel() for shard in shards) for shards in by_owner]
    sizes = [[shard.size_of(rank, world_size) for shard in own] for rank in range(world_size)]
    received = _exchanged(comm, sent, sent_sizes, [sum(of_rank) for of_rank in sizes])
    pieces = [
        torch.split(flat, of_rank) for flat, of_rank in zip(received, sizes, strict=True)
    ]  # by rank, then by matrix
    return [
        torch.cat([of_rank[number] for of_rank in pieces]).view(shard.shape)
        for number, shard in enumerate(own)
    ]


def _cut_again(
    comm: Comm,
    by_owner: Sequence[Sequence[Shard]],
    results: Sequence[torch.Tensor],
    meet: torch.device,
) -> list[list[torch.Tensor]]:
    """This process's rows of all processes' results, by owner."""
    world_size, own = comm.world_size, by_owner[comm.rank]
    sizes = [[shard.size_of(rank, world_size) for shard in own] for rank in range(world_size)]
    by_matrix = [
        torch.split(result.reshape(-1), [of_rank[number] for of_rank in sizes])
        for number, result in enumerate(results)
    ]
    rows = [pieces[rank] for rank in range(world_size) for pieces in by_matrix]
    dtype = next(shard.rows.dtype for shards in by_owner for shard in shards)
    sent = _side_by_side(rows, meet) if rows else torch.empty(0, dtype=dtype, device=meet)
    received = _exchanged(
        comm,
        sent,
        [sum(of_rank) for of_rank in sizes],
        [sum(shard.rows.numel() for shard in shards) for shards in by_owner],
    )
    return [
        [
            piece.view(shard.rows.shape)
            for piece, shard in zip(
                torch.split(flat, [shard.rows.numel() for shard in shards]), shards, strict=True
            )
        ]
        for flat, shards in zip(received, by_owner, strict=True)
    ]


def _exchanged(
    comm: Comm, sent: torch.Tensor, sent_sizes: list[int], received_sizes: list[int]
) -> Sequence[torch.Tensor]:
    """The rows that each process has sent to this one, by rank."""
    received = sent.new_empty(sum(received_sizes))
    dist.all_to_all_single(received, sent, received_sizes, sent_sizes, group=comm.group)
    pieces: Sequence[torch.Tensor] = torch.split(received, received_sizes)
    return pieces


def _side_by_side(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors]).to(device)
