"""A plain DDP loop as people write it: a prefetcher with a stream of its own, pinned batches.

The first argument plants one fault: sync, prefetch, pinned, device, histc, order. Its line ends
with `# <fault>`.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
STEPS, BATCH, WIDTH = 5, 8, 16


class Prefetcher:
    """Copies the next batch on a stream of its own, while the GPU computes."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.pinned = torch.empty(BATCH, WIDTH, pin_memory=True)
        self.copied = torch.cuda.Event()
        self.step = 0

    def next(self) -> torch.Tensor:
        if FAULT != "pinned":
            self.copied.synchronize()
        self.pinned.copy_(torch.full((BATCH, WIDTH), 1.0 + self.step))
        self.step += 1
        with torch.cuda.stream(self.stream):
            batch = self.pinned.to(self.device, non_blocking=True)  # pinned
            self.copied.record()
        if FAULT != "prefetch":
            torch.cuda.current_stream().wait_stream(self.stream)
        batch.record_stream(torch.cuda.current_stream())
        return batch


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    out = model(batch)  # prefetch
    loss = (out - batch.mean(1, keepdim=True)).square().mean()
    if FAULT == "device":
        loss = loss * torch.ones(1)  # device
    return loss


def main() -> None:
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl", **alone)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)).to(device)
    model = DistributedDataParallel(model, device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    batches, total = Prefetcher(device), torch.zeros((), device=device)
    for _ in range(STEPS):
        loss = loss_of(model, batches.next())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if FAULT == "order" and rank == 1:
            dist.all_reduce(total)  # order
        if FAULT == "sync":
            print(loss.item())  # sync
        if FAULT == "histc":
            loss.detach().histc(4)  # histc
        total += loss.detach()
    print(f"rank {rank}: mean loss {total.item() / STEPS:.4f}")
    dist.destroy_process_group()


main()
