"""An LSTM with dropout between its layers, on lines as long as they are: `collate` pads them."""

import numpy as np
import torch.nn.functional as F
from torch import nn

from samecurve import Mean


class Counting:
    """Lines such as "17, 18, 19, 20", as codes of characters, each of its own length."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, ids):
        return {"text": [self.line(i) for i in ids]}

    def line(self, i):
        first, length = np.random.default_rng(i).integers((0, 2), (90, 9))
        return np.frombuffer(", ".join(map(str, range(first, first + length))).encode(), np.uint8)


class Reader(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed, self.head = nn.Embedding(128, width), nn.Linear(width, 128)
        self.lstm = nn.LSTM(width, width, num_layers=2, dropout=0.1, batch_first=True)

    def forward(self, text):
        hidden, _ = self.lstm(self.embed(text))
        return self.head(hidden)


class NextCharacter:
    def __init__(self, model, data):
        self.fields, self.data = model, data

    def model(self):
        return Reader(**self.fields)

    def collate(self, samples):  # of one microbatch
        longest = max(len(sample["text"]) for sample in samples)
        text = np.zeros((len(samples), longest), np.int64)
        for row, sample in zip(text, samples, strict=True):
            row[: len(sample["text"])] = sample["text"]
        return {"text": text}

    def loss(self, model, batch):
        text = batch["text"]
        logits, wanted = model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()
        error = F.cross_entropy(logits, wanted, ignore_index=0, reduction="sum")
        return Mean(error, (wanted != 0).sum())

    def train_data(self):
        return Counting(self.data["samples"])
