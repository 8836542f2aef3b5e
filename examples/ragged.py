"""Lines of unequal length: the loss is a sum over characters, so padding counts for nothing."""

import numpy as np
import torch.nn.functional as F
from torch import nn

from samecurve import Mean


class Lines:
    def __init__(self, numbers):
        self.numbers = numbers

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, ids):
        text, labels = np.zeros((len(ids), 40), np.int64), np.full((len(ids), 40), -100)
        for row, number in enumerate(self.numbers[i] for i in ids):
            a, b = number * 7919 % 1000, number * 104729 % 10 ** (number % 12)
            codes = list(f"{a} and {b} make {a + b}\n".encode())
            text[row, : len(codes)], labels[row, : len(codes) - 1] = codes, codes[1:]
        return {"text": text, "labels": labels}


class Reader(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.embed, self.head = nn.Embedding(128, width), nn.Linear(width, 128)
        self.layers = nn.ModuleList(nn.Conv1d(width, width, 3, dilation=2**i) for i in range(depth))

    def forward(self, text):
        x = self.embed(text).transpose(1, 2)
        for i, layer in enumerate(self.layers):  # padded on the left: the past alone is seen
            x = x + F.gelu(layer(F.pad(x, (2 * 2**i, 0))))
        return self.head(x.transpose(1, 2))


class Ragged:
    def __init__(self, model, data):
        self.fields, self.data = model, data

    def model(self):
        return Reader(**self.fields)

    def loss(self, model, batch):
        logits, labels = model(batch["text"]).flatten(0, 1), batch["labels"].flatten()
        return Mean(F.cross_entropy(logits, labels, reduction="sum"), (labels != -100).sum())

    def metrics(self, model, batch):
        right = model(batch["text"]).argmax(-1) == batch["labels"]
        return {"accuracy": Mean(right.sum(), (batch["labels"] != -100).sum())}

    def train_data(self):
        return Lines(range(self.data["samples"]))

    def eval_data(self):
        first = self.data["samples"]
        return Lines(range(first, first + self.data["held_out"]))
