import os

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from parts import Net, Points
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader

set_seed(0)
accelerator = Accelerator(step_scheduler_with_optimizer=False)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = CosineAnnealingLR(optimizer, T_max=100)
size = 50 // accelerator.num_processes
train = DataLoader(Points(0, 1000), batch_size=size, shuffle=True)
held_out = DataLoader(Points(1000, 200), batch_size=size)
model, optimizer, train, held_out, schedule = accelerator.prepare(
    model, optimizer, train, held_out, schedule
)
first = 0
if os.path.isdir("saved"):
    accelerator.load_state("saved")
    first = schedule.scheduler.last_epoch // len(train)
for epoch in range(first, 5):
    model.train()
    for batch in train:
        loss = F.cross_entropy(model(batch["x"]), batch["inside"])
        optimizer.zero_grad()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()
    right = 0
    for batch in held_out:
        with torch.no_grad():
            chosen = model(batch["x"]).argmax(-1)
        chosen, inside = accelerator.gather_for_metrics((chosen, batch["inside"]))
        right += (chosen == inside).sum().item()
    accelerator.print(epoch, loss.item(), right / 200)
    accelerator.save_state("saved")
