"""A run of the Hugging Face Trainer on rows of numbers.

The first argument plants one fault: sync, device. Its line ends with `# <fault>`.
"""

import sys
import tempfile

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class WeightedTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **_):  # noqa: FBT002
        outputs = model(**inputs)
        loss = outputs["loss"]
        if FAULT == "device":
            loss = (loss * torch.ones(2)).mean()  # device
        if FAULT == "sync":
            self.worst = max(getattr(self, "worst", 0.0), loss.item())  # sync
        return (loss, outputs) if return_outputs else loss


def rows() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 16, generator=generator)
    return [{"x": row, "labels": (row.sum() > 0).long()} for row in x]


with tempfile.TemporaryDirectory() as directory:
    arguments = TrainingArguments(
        output_dir=directory,
        max_steps=5,
        per_device_train_batch_size=4,
        logging_steps=5,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    torch.manual_seed(0)
    WeightedTrainer(model=Model(), args=arguments, train_dataset=rows()).train()
