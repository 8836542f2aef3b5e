"""One rank that calls every collective of the emulated NCCL or Gloo and compares with numpy.

test_collectives.py starts it: `python collective_checks.py WHAT MEETING`, with RANK and WORLD_SIZE.
"""

import os
import sys
import time
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _make_nccl_premul_sum

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE = torch.device("cuda", RANK)


def values(rank: int, *shape: int) -> np.ndarray:
    """What a rank begins with; every rank knows it of every rank."""
    return np.random.default_rng(rank).integers(-4, 5, shape or (6,)).astype(np.float64)


def tensor(array: np.ndarray, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(array, dtype=dtype, device=DEVICE)


def same(found: torch.Tensor, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(found.double().cpu().numpy(), expected)


def every(*shape: int) -> np.ndarray:
    return np.stack([values(rank, *shape) for rank in range(SIZE)])


def reductions() -> None:
    """all_reduce, reduce and reduce_scatter with each operation, small and large."""
    kinds = dist.ReduceOp
    for shape in ((6,), (2 * SIZE, 4096)):
        whole = every(*shape)
        expected = {
            kinds.SUM: whole.sum(0),
            kinds.MAX: whole.max(0),
            kinds.MIN: whole.min(0),
            kinds.PRODUCT: whole.prod(0),
            kinds.AVG: whole.sum(0) / SIZE,
        }
        for kind, result in expected.items():
            found = tensor(values(RANK, *shape))
            dist.all_reduce(found, kind)
            same(found, result)
        for root in range(SIZE):
            found = tensor(values(RANK, *shape))
            dist.reduce(found, root)
            if root == RANK:
                same(found, whole.sum(0))
            elif dist.get_backend() == "nccl":  # Gloo leaves partial sums there
                same(found, values(RANK, *shape))
    if dist.get_backend() == "nccl":
        found = tensor(values(RANK))
        dist.all_reduce(found, _make_nccl_premul_sum(0.5))
        same(found, every().sum(0) / 2)
    for dtype in (torch.bfloat16, torch.float16, torch.int32, torch.uint8):
        found = tensor(np.abs(values(RANK)), dtype)
        dist.all_reduce(found)
        same(found, np.abs(every()).sum(0))
    found = torch.empty(4, dtype=torch.float64, device=DEVICE)
    dist.reduce_scatter_tensor(found, tensor(values(RANK, 4 * SIZE)))
    same(found, every(4 * SIZE).sum(0)[4 * RANK : 4 * RANK + 4])
    parts = list(tensor(values(RANK, SIZE, 4)).unbind())
    dist.reduce_scatter(found, parts, dist.ReduceOp.MAX)
    same(found, every(SIZE, 4).max(0)[RANK])


def movements() -> None:
    """broadcast, gathers, scatters and exchanges, with equal and unequal parts."""
    for root in range(SIZE):
        found = tensor(values(RANK))
        dist.broadcast(found, root)
        same(found, values(root))
        parts = [tensor(values(9 + rank)) for rank in range(SIZE)] if root == RANK else None
        dist.scatter(found, parts, root)
        same(found, values(9 + RANK))
        places = [torch.empty_like(found) for _ in range(SIZE)] if root == RANK else None
        dist.gather(tensor(values(RANK)), places, root)
        if places is not None:
            same(torch.stack(places), every())
    places = [torch.empty(6, dtype=torch.float64, device=DEVICE) for _ in range(SIZE)]
    dist.all_gather(places, tensor(values(RANK)))
    same(torch.stack(places), every())
    found = torch.empty(6 * SIZE, dtype=torch.float64, device=DEVICE)
    dist.all_gather_into_tensor(found, tensor(values(RANK)))
    same(found, every().reshape(-1))
    sizes = [[source + 2 * target for target in range(SIZE)] for source in range(SIZE)]
    sent = tensor(values(RANK, sum(sizes[RANK]), 3))
    received = [sizes[source][RANK] for source in range(SIZE)]
    found = torch.empty(sum(received), 3, dtype=torch.float64, device=DEVICE)
    dist.all_to_all_single(found, sent, received, sizes[RANK])
    expected = []
    for source in range(SIZE):
        begin = sum(sizes[source][:RANK])
        rows = values(source, sum(sizes[source]), 3)
        expected.append(rows[begin : begin + sizes[source][RANK]])
    same(found, np.concatenate(expected))
    if dist.get_backend() == "gloo":
        return
    outputs = [torch.empty(6, dtype=torch.float64, device=DEVICE) for _ in range(SIZE)]
    dist.all_to_all(outputs, [tensor(values(RANK) + rank) for rank in range(SIZE)])
    same(torch.stack(outputs), every() + RANK)


def messages() -> None:
    """send and recv, and a ring in one batch."""
    found = torch.empty(6, dtype=torch.float64, device=DEVICE)
    if RANK == 0:
        dist.send(tensor(values(0)), 1)
    elif RANK == 1:
        dist.recv(found, 0)
        same(found, values(0))
    before, after = (RANK - 1) % SIZE, (RANK + 1) % SIZE
    sent = tensor(values(RANK))
    operations = [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, found, before)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    same(found, values(before))


def groups() -> None:
    """new_group, split_group, CPU tensors beside CUDA tensors, futures, objects."""
    pair = dist.new_group([0, 1])
    if RANK < 2:
        found = tensor(values(RANK))
        dist.all_reduce(found, group=pair)
        same(found, every()[:2].sum(0))
    parts = [[0, 1], *([rank] for rank in range(2, SIZE))]
    split = dist.split_group(split_ranks=parts)
    found = tensor(values(RANK))
    dist.all_reduce(found, group=split)
    same(found, every()[:2].sum(0) if RANK < 2 else values(RANK))
    both = dist.new_group(backend="cpu:gloo,cuda:nccl")
    on_cpu = torch.tensor(values(RANK))
    dist.all_reduce(on_cpu, group=both)
    same(on_cpu, every().sum(0))
    work = dist.all_reduce(tensor(values(RANK)), async_op=True)
    doubled = work.get_future().then(lambda done: done.value()[0] * 2).wait()
    same(doubled, every().sum(0) * 2)
    assert work.is_completed()
    objects = [None] * SIZE
    dist.all_gather_object(objects, {"rank": RANK})
    assert objects == [{"rank": rank} for rank in range(SIZE)]


def refusals() -> None:
    """What NCCL or torch refuses, in torch's words."""
    grid = torch.zeros(4, 6, device=DEVICE)
    refused: list[tuple[str, Any]] = [
        ("not supported for NCCL process group: Short", lambda: dist.all_reduce(grid.short())),
        ("No backend type associated with device type cpu", lambda: dist.all_reduce(grid.cpu())),
        ("Tensors must be contiguous", lambda: dist.all_reduce(grid.t())),
        ("Cannot use ReduceOp.BAND with NCCL", lambda: dist.all_reduce(grid, dist.ReduceOp.BAND)),
        ("Split sizes doesn't match", lambda: dist.all_to_all_single(grid, grid, [1] * SIZE)),
    ]
    for text, call in refused:
        with pytest.raises((RuntimeError, ValueError, TypeError), match=text):
            call()


def late() -> None:
    """A collective does not block the host, and a result that nobody waited for is no result."""
    found = torch.ones(6, device=DEVICE)
    torch.cuda.synchronize()
    if RANK == 0:
        work = dist.all_reduce(found, async_op=True)
        assert not work.is_completed()  # the others come half a second later
        began = time.monotonic()
        read = found + 0  # planted: no wait()
        assert time.monotonic() - began < 0.4
        work.wait()
        assert found.tolist() == [SIZE] * 6
        assert read.tolist() != [SIZE] * 6
    else:
        time.sleep(0.5)
        dist.all_reduce(found)
        assert found.tolist() == [SIZE] * 6
    import emulated_cuda_native as native

    assert bool(native.reports()) == (RANK == 0), native.reports()


def disagree() -> None:
    """Ranks call other sizes. The watchdog ends them; the host goes on until it synchronizes."""
    dist.all_reduce(torch.ones(3 + RANK, device=DEVICE), async_op=True)
    print("the host goes on", flush=True)
    torch.cuda.synchronize()


def aborted() -> None:
    """An abort ends what hangs."""
    if RANK:
        return
    work = dist.all_reduce(torch.ones(3, device=DEVICE), async_op=True)
    dist.distributed_c10d._abort_process_group()
    assert not work.wait()


CHECKS = {
    "nccl": [reductions, movements, messages, groups, refusals, late, aborted],
    "gloo": [reductions, movements],
    "disagree": [disagree],
}


def main(what: str, meeting: str) -> None:
    torch.cuda.set_device(DEVICE)
    place: dict[str, Any] = {"init_method": f"file://{meeting}", "rank": RANK, "world_size": SIZE}
    if what == "gloo":
        dist.init_process_group("gloo", **place)
    else:
        seconds = 2 if what == "disagree" else 60
        timeout = timedelta(seconds=seconds)
        dist.init_process_group("nccl", device_id=DEVICE, timeout=timeout, **place)
    for check in CHECKS[what]:
        check()
        print(f"rank {RANK} {check.__name__}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
