"""As written for torchrun: a linear model under DDP, data by rank."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

if __name__ == "__main__":
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, local = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    place = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Linear(4, 1).to(place), device_ids=[local] if place.type == "cuda" else None
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        inputs = torch.randn(8, 4, generator=generator).to(place)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"rank {rank} of {dist.get_world_size()}: weight {model.module.weight.sum().item():.6f}")
    dist.destroy_process_group()
