"""The sides of benchmarks/curves.py: one small model, trained for some epochs by each trainer as
its own documentation advises, on the ranks that this process is one of.

- Accelerate: the guide on gradient accumulation, its part on samples of variable size (targets
  counted over microbatches and processes); the guide on comparing setups (`set_seed`); its
  reproducible sampler.
- Lightning: a mean in `training_step`, `accumulate_grad_batches`, `seed_everything`, `self.log`
  with `sync_dist`. The sampler is torch's DistributedSampler on one rank too: of itself Lightning
  shuffles a single device's data in another order, so that its lines would differ from the start.
- Hugging Face Trainer: `compute_loss_func` with `num_items_in_batch`, tokens averaged across
  devices (its default), `gradient_accumulation_steps`.

All have microbatches of 6 and a batch of 24: 4, 2 or 1 accumulation steps on 1, 2 or 4 ranks. Same
first weights, AdamW, constant rate and clipping.
"""

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from benchmarks.curves_task import Lines, Reader, loss_of

MICRO, BATCH, STEPS, LR, CLIP, BETAS = 6, 24, 60, 3e-3, 1.0, (0.9, 0.999)


@dataclass(frozen=True)
class Case:
    """samples: of an epoch; ragged: lines of unequal length; dropout: its share"""

    samples: int
    ragged: bool
    dropout: float

    @property
    def epochs(self) -> int:
        """The number of epochs that has all the steps."""
        return STEPS // math.ceil(self.samples / BATCH)


@dataclass(frozen=True)
class Curve:
    """The results of a run.

    losses: the loss of each step, as the trainer reports it
    samples: the samples of this rank in each step
    model: the trained model
    """

    losses: list[float]
    samples: list[list[int]]
    model: nn.Module


class Samples(Dataset[Any]):
    """A data set of single lines, for torch's loaders."""

    def __init__(self, case: Case) -> None:
        self._lines = Lines(0, case.samples, ragged=case.ragged)

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self._lines[np.asarray([index])]
        return {name: torch.as_tensor(array[0]) for name, array in row.items()}


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def accumulation() -> int:
    return BATCH // MICRO // world_size()


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=0.0)


def accelerate(case: Case, _home: Path) -> Curve:
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.utils import set_seed

    set_seed(0)
    rounds = accumulation()
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=rounds,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    bare = Reader(case.dropout)
    loader = DataLoader(Samples(case), batch_size=MICRO, shuffle=True)
    model, optimizer, loader = accelerator.prepare(bare, adamw(bare), loader)
    losses, steps = [], []
    for _ in range(case.epochs):
        for batches in _accumulated(loader, rounds):
            counted = sum(batch["labels"].ne(-100).sum() for batch in batches)
            counted = accelerator.gather(counted).sum().item()
            scale, parts = rounds * accelerator.num_processes / counted, []
            for index, batch in enumerate(batches):
                last = index == len(batches) - 1
                waits = not last and accelerator.num_processes > 1
                with model.no_sync() if waits else contextlib.nullcontext():
                    loss = loss_of(model(batch["text"]), batch["labels"], "sum") * scale
                    accelerator.backward(loss)
                    parts.append(loss.detach())
            accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            total = accelerator.gather(sum(parts)).sum().item()
            losses.append(total / (accelerator.num_processes * rounds))
            steps.append([int(i) for batch in batches for i in batch["ids"]])
    return Curve(losses, steps, bare)


def _accumulated(loader: Any, rounds: int) -> Iterator[list[Any]]:
    """The microbatches of each step. An epoch's last step has the remaining ones."""
    batches, left = iter(loader), len(loader)
    for _ in range(math.ceil(left / rounds)):
        yield [next(batches) for _ in range(min(rounds, left))]
        left -= rounds


def lightning(case: Case, home: Path) -> Curve:
    import lightning.pytorch as pl

    losses: list[float] = []
    steps: list[list[int]] = []
    parts: list[float] = []
    seen: list[int] = []

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.reader = Reader(case.dropout)

        def training_step(self, batch: Any, _index: int) -> torch.Tensor:
            seen.extend(int(i) for i in batch["ids"])
            loss = loss_of(self.reader(batch["text"]), batch["labels"], "mean")
            self.log("loss", loss, on_step=True, on_epoch=False, sync_dist=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self)

        def train_dataloader(self) -> DataLoader[Any]:
            world, rank = self.trainer.world_size, self.trainer.global_rank
            sampler: Any = DistributedSampler(Samples(case), world, rank, shuffle=True, seed=0)
            return DataLoader(Samples(case), batch_size=MICRO, sampler=sampler)

    class Steps(pl.Callback):  # type: ignore[misc]
        """What was logged for the microbatches of a step, and their mean."""

        done = 0

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            parts.append(float(trainer.callback_metrics["loss"]))
            if trainer.global_step > self.done:
                self.done = trainer.global_step
                losses.append(sum(parts) / len(parts))
                steps.append(list(seen))
                parts.clear()
                seen.clear()

    pl.seed_everything(0, workers=True, verbose=False)
    module = Module()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world_size(),
        strategy="ddp" if world_size() > 1 else "auto",
        max_epochs=case.epochs,
        accumulate_grad_batches=accumulation(),
        gradient_clip_val=CLIP,
        use_distributed_sampler=False,  # ours above is one
        default_root_dir=home,
        callbacks=[Steps()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module)
    return Curve(losses, steps, module.reader)


def hf_trainer(case: Case, home: Path) -> Curve:
    from transformers.trainer import Trainer
    from transformers.trainer_callback import PrinterCallback, TrainerCallback
    from transformers.trainer_utils import set_seed
    from transformers.training_args import TrainingArguments

    losses: list[float] = []
    steps: list[list[int]] = []
    seen: list[int] = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.reader = Reader(case.dropout)

        def forward(self, text: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            seen.extend(int(i) for i in ids)
            logits: torch.Tensor = self.reader(text)
            return logits

    class Steps(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            del args, state, control
            if "loss" in logs:
                losses.append(float(logs["loss"]))
                steps.append(list(seen))
                seen.clear()

    def summed(outputs: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Any) -> Any:
        return loss_of(outputs, labels, "sum") / num_items_in_batch

    arguments = TrainingArguments(
        str(home),
        num_train_epochs=case.epochs,
        per_device_train_batch_size=MICRO,
        gradient_accumulation_steps=accumulation(),
        learning_rate=LR,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        max_grad_norm=CLIP,
        seed=0,
        logging_steps=1,
        remove_unused_columns=False,
        label_names=["labels"],
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        ddp_backend="gloo" if world_size() > 1 else None,
    )
    set_seed(0)
    model = Model()
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Samples(case),
        compute_loss_func=summed,
        callbacks=[Steps()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return Curve(losses, steps, model.reader)


SIDES: dict[str, Callable[[Case, Path], Curve]] = {
    "accelerate": accelerate,
    "lightning": lightning,
    "transformers": hf_trainer,
}
