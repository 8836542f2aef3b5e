"""A loop with Accelerate, as its tutorial has it.

The first argument plants one fault: sync, stream. Its line ends with `# <fault>`.
"""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""

accelerator = Accelerator()
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 16), torch.randint(0, 2, (64,)))
model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
metrics_stream = torch.cuda.Stream()
hits = torch.zeros((), device=accelerator.device)

for step, (x, label) in enumerate(loader):
    if step == 5:
        break
    out = model(x)
    loss = nn.functional.cross_entropy(out, label)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    if FAULT == "stream":
        with torch.cuda.stream(metrics_stream):
            hits += (out.argmax(1) == label).sum()  # stream
    else:
        hits += (out.argmax(1) == label).sum()
    if FAULT == "sync":
        print(step, loss.item())  # sync

metrics_stream.synchronize()
accelerator.print(f"hits {accelerator.gather(hits[None]).sum().item():.0f}")
accelerator.end_training()
