import torch
import torch.nn.functional as F
from parts import Net, Points
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader

torch.manual_seed(0)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = CosineAnnealingLR(optimizer, T_max=100)
train = DataLoader(Points(0, 1000), batch_size=50, shuffle=True)
held_out = DataLoader(Points(1000, 200), batch_size=50)
for epoch in range(5):
    model.train()
    for batch in train:
        loss = F.cross_entropy(model(batch["x"]), batch["inside"])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        right = sum((model(b["x"]).argmax(-1) == b["inside"]).sum().item() for b in held_out)
    print(epoch, loss.item(), right / 200)
    torch.save(model.state_dict(), "model.pt")
