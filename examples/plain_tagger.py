"""What docs/for-agents.md ports to examples/tagger.py: a plain PyTorch script for one device.

python examples/plain_tagger.py
"""

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Lines(Dataset):
    """Lines of 5 to 20 digits. Which digits are larger than all before them?"""

    def __init__(self, first, count):
        rng = np.random.default_rng(first)
        self.lines = [rng.integers(0, 10, rng.integers(5, 21)) for _ in range(count)]

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, index):
        digits = torch.tensor(self.lines[index])
        before = torch.cat([torch.tensor([-1]), digits.cummax(0).values[:-1]])
        return digits, (digits > before).long()


def pad(samples):
    digits, labels = zip(*samples, strict=True)
    return (
        nn.utils.rnn.pad_sequence(digits, batch_first=True, padding_value=10),
        nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100),
    )


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 32)
        self.rnn = nn.GRU(32, 64, batch_first=True)
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(64, 2))

    def forward(self, digits):
        return self.head(self.rnn(self.embed(digits))[0])


random.seed(0), np.random.seed(0), torch.manual_seed(0)
loader = DataLoader(Lines(1, 2000), batch_size=32, shuffle=True, collate_fn=pad)
held_out = DataLoader(Lines(2, 200), batch_size=200, collate_fn=pad)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
accumulate, epochs = 2, 5
steps = epochs * len(loader) // accumulate
schedule = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: min((step + 1) / 20, (steps - step) / (steps - 20))
)
for epoch in range(epochs):
    model.train()
    for number, (digits, labels) in enumerate(loader):
        loss = F.cross_entropy(model(digits).flatten(0, 1), labels.flatten())
        (loss / accumulate).backward()
        if (number + 1) % accumulate == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    model.eval()
    with torch.no_grad():
        digits, labels = next(iter(held_out))
        right = (model(digits).argmax(-1) == labels)[labels != -100]
    print(f"epoch {epoch + 1} loss {loss.item():.4f} accuracy {right.float().mean().item():.4f}")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "tagger.pt")
