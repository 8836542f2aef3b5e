"""Text classification with a BERT of Hugging Face's transformers, its own dropout left on."""

import numpy as np
import torch.nn.functional as F
from transformers import BertConfig, BertForSequenceClassification

from samecurve import Mean


class Reviews:
    """Texts of 4 to 16 words out of 50; five are good, five bad, and which there are more of is
    the label.
    """

    def __init__(self, first, count):
        self.first, self.count = first, count

    def __len__(self):
        return self.count

    def __getitem__(self, ids):
        words, labels = np.zeros((len(ids), 16), np.int64), np.zeros(len(ids), np.int64)
        for row, i in enumerate(ids):
            random = np.random.default_rng(self.first + i)
            text = random.integers(1, 50, random.integers(4, 17))
            labels[row] = random.integers(0, 2)
            text[: len(text) // 2] = random.integers(1, 6, len(text) // 2) + 5 * labels[row]
            words[row, : len(text)] = random.permutation(text)
        return {"input_ids": words, "attention_mask": (words > 0) * 1, "labels": labels}


class Sentiment:
    def __init__(self, model, data):
        self.fields, self.data = model, data

    def model(self):
        return BertForSequenceClassification(BertConfig(**self.fields))

    def loss(self, model, batch):
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return Mean(F.cross_entropy(logits, batch["labels"], reduction="sum"), len(logits))

    def metrics(self, model, batch):
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return {"accuracy": Mean((logits.argmax(1) == batch["labels"]).sum(), len(logits))}

    def train_data(self):
        return Reviews(0, self.data["samples"])

    def eval_data(self):
        return Reviews(self.data["samples"], 200)
