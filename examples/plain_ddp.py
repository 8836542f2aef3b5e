"""The script of docs/coming-from-others.md#torchrun-scripts: DistributedDataParallel by hand.

torchrun --nproc_per_node=2 examples/plain_ddp.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.manual_seed(0)
x = torch.rand(1000, 2) * 2 - 1
radius = x.norm(dim=1)
data = TensorDataset(x, ((radius > 0.4) & (radius < 0.8)).long())
model = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 2))

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
model = DistributedDataParallel(model)
sampler = DistributedSampler(data, shuffle=True, seed=0)
loader = DataLoader(data, batch_size=50 // world, sampler=sampler)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
step = 0
for epoch in range(10):
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        dist.all_reduce(loss := loss.detach(), op=dist.ReduceOp.SUM)
        if rank == 0 and step % 50 == 0:
            print(f"step {step} loss {loss.item() / world:.4f}", flush=True)
    if rank == 0:
        torch.save(
            {
                "model": model.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "epoch": epoch,
            },
            "last.pt",
        )
dist.destroy_process_group()
