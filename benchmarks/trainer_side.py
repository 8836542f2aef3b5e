"""HF Trainer on batches that are given, on a CPU; for benchmarks that take turns with it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Of a run."""

    home: Path
    steps: int
    samples: int  # of a batch of one rank
    lr: float
    clip: float
    world: int = 1


Batches = Callable[[], Iterator[dict[str, torch.Tensor]]]


def train_by_trainer(
    model: Any,
    batches: Batches,
    on_log: Callable[[int, Mapping[str, Any]], None],
    settings: Settings,
    rows: Any,
) -> None:
    """on_log: takes each step's number and what is logged of it.

    rows: a data set, which it asks for and does not read
    """
    from transformers.trainer import Trainer
    from transformers.trainer_callback import PrinterCallback, TrainerCallback
    from transformers.training_args import TrainingArguments

    class Lines(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            del args, control
            if "grad_norm" in logs:
                on_log(state.global_step, logs)

    class Loader(list[Any]):
        batch_size = settings.samples

        def __iter__(self) -> Iterator[Any]:
            return batches()

        def __len__(self) -> int:
            return settings.steps

    class OnOurBatches(Trainer):
        def get_train_dataloader(self) -> Any:
            return Loader()

    arguments = TrainingArguments(
        str(settings.home),
        max_steps=settings.steps,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        max_grad_norm=settings.clip,
        learning_rate=settings.lr,
        lr_scheduler_type="constant",
        save_strategy="no",
        use_cpu=True,
        optim="adamw_torch_fused",
        per_device_train_batch_size=settings.samples,
        ddp_backend="gloo" if settings.world > 1 else None,
    )
    assert arguments.world_size == settings.world
    trainer = OnOurBatches(model=model, args=arguments, train_dataset=rows, callbacks=[Lines()])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
