"""examples/plain_tagger.py as a task, as docs/for-agents.md says."""

import numpy as np
import torch.nn.functional as F
from torch import nn

from samecurve import Mean


class Lines:
    """Lines of 5 to 20 digits. Which digits are larger than all before them?"""

    def __init__(self, first, count):
        rng = np.random.default_rng(first)
        self.lines = [rng.integers(0, 10, rng.integers(5, 21)) for _ in range(count)]

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, ids):
        digits = np.full((len(ids), 20), 10)
        labels = np.full((len(ids), 20), -100)
        for row, line in enumerate(self.lines[index] for index in ids):
            digits[row, : len(line)] = line
            before = np.concatenate([[-1], np.maximum.accumulate(line)[:-1]])
            labels[row, : len(line)] = line > before
        return {"digits": digits, "labels": labels}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 32)
        self.rnn = nn.GRU(32, 64, batch_first=True)
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(64, 2))

    def forward(self, digits):
        return self.head(self.rnn(self.embed(digits))[0])


class Tagger:
    def model(self):
        return Net()

    def train_data(self):
        return Lines(1, 2000)

    def eval_data(self):
        return Lines(2, 200)

    def loss(self, model, batch):
        logits, labels = model(batch["digits"]), batch["labels"]
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return Mean(total, (labels != -100).sum())

    def metrics(self, model, batch):
        counted = batch["labels"] != -100
        right = model(batch["digits"]).argmax(-1) == batch["labels"]
        return {"accuracy": Mean((right & counted).sum(), counted.sum())}
