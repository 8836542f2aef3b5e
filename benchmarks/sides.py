"""How others, and Samecurve, train one language model for some steps: the sides of
benchmarks/gpu.py. Each trains setting.total steps, ticks a Clock after each, and returns nothing:
the clock reports the seconds of a step.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.common import trained
from benchmarks.gpu_profile import PROFILED, Watch
from samecurve.core.config.sections import Config
from samecurve.core.events import Event
from samecurve.core.planning.plan import Plan
from samecurve.tasks.adapter import TaskAdapter
from samecurve.torch_engine.engine import TorchEngine
from samecurve.torch_engine.process_group import Comm


@dataclass(frozen=True)
class Setting:
    """warm: steps before those that are timed. watch: of this turn."""

    task: TaskAdapter
    config: Config
    plan: Plan
    device: torch.device
    home: Path
    warm: int
    steps: int
    watch: Watch | None = None

    @property
    def total(self) -> int:
        return self.warm + self.steps + PROFILED

    def timed(self, seconds: float) -> None:
        if self.watch:
            self.watch.timed(seconds)

    def ended(self) -> None:
        if self.watch:
            self.watch.ended()


@dataclass(frozen=True)
class Side:
    """needs: the package without which it is left out."""

    run: Callable[[Setting], None]
    needs: str = ""
    extra: str = ""


class Clock:
    """Ticked after every step; waits for the device twice: before the first step that counts, and
    after the last.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting, self._steps, self._began = setting, 0, 0.0

    def tick(self) -> None:
        setting = self._setting
        self._steps += 1
        if self._steps == setting.total:
            setting.ended()
        if self._steps not in {setting.warm, setting.warm + setting.steps}:
            return
        if setting.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self._steps == setting.warm:
            self._began = now
        else:
            setting.timed((now - self._began) / setting.steps)


def samecurve(setting: Setting, *, float8: bool = False) -> None:
    """Its whole loop, journal and heartbeat included.

    A step is told of when the next one is queued, so the clock waits for nothing.
    """
    features = {**setting.plan.features, **({"float8": True} if float8 else {})}
    made = replace(setting.plan, features=features)
    engine = TorchEngine(setting.task, made, setting.config.optimizer, Comm(), [setting.device])
    times: list[float] = []

    def record(event: Event) -> None:
        if event.kind == "step":
            times.append(time.perf_counter())
            if len(times) == setting.warm + setting.steps:
                setting.timed((times[-1] - times[setting.warm - 1]) / setting.steps)

    trained(engine, setting.task, made, setting.home / f"run-{time.time_ns()}", record)
    setting.ended()


class Plain(nn.Module):
    """Tokens and labels -> mean loss, all logits at once, as nanoGPT's model has it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(
            self.model(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100
        )


class Answer(nn.Module):
    """As the Hugging Face libraries want it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.plain = Plain(model)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.plain(tokens, labels)}


def model_of(setting: Setting) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = setting.task.model()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, 0.0, 0.02)
    return model


def adamw(model: nn.Module, setting: Setting) -> torch.optim.AdamW:
    """Fused; decay on matrices only."""
    fields, parameters = setting.config.optimizer, list(model.parameters())
    groups = [
        {
            "params": [p for p in parameters if (p.ndim > 1) == decayed],
            "weight_decay": fields.weight_decay * decayed,
        }
        for decayed in (True, False)
    ]
    return torch.optim.AdamW(groups, lr=fields.lr, betas=fields.betas, fused=True)


def batches(setting: Setting) -> Iterator[dict[str, torch.Tensor]]:
    """Micro-batches on the device, from pinned memory, without end."""
    data, random, gpu = (
        setting.task.train_data(),
        np.random.default_rng(0),
        setting.device.type == "cuda",
    )
    while True:
        rows = {
            name: torch.from_numpy(np.ascontiguousarray(array))
            for name, array in data[
                random.integers(0, len(data), setting.plan.batch.micro_batch_size)
            ].items()
        }
        yield {
            name: (
                rows[name].pin_memory().to(setting.device, non_blocking=True) if gpu else rows[name]
            )
            for name in ("tokens", "labels")
        }


def plain(setting: Setting) -> None:
    model = Plain(model_of(setting)).to(setting.device)
    optimizer, clock, rounds = (
        adamw(model, setting),
        Clock(setting),
        setting.plan.batch.accumulation_steps,
    )
    compiled: Any = torch.compile(model)
    fed = batches(setting)
    rows = next(fed)
    for _ in range(setting.total):
        for _ in range(rounds):
            with torch.autocast(setting.device.type, dtype=torch.bfloat16):
                loss = compiled(**rows) / rounds
            rows = next(fed)  # while the device computes
            torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), setting.config.optimizer.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        clock.tick()


class Rows(torch.utils.data.Dataset[Any]):
    """One sample at a time, as torch's loaders ask for them."""

    def __init__(self, setting: Setting) -> None:
        self._data = setting.task.train_data()
        self._most = setting.total * setting.plan.batch.global_batch_size

    def __len__(self) -> int:
        return self._most

    def __getitem__(self, index: int) -> dict[str, Any]:
        rows = self._data[np.asarray([index % len(self._data)])]
        return {
            name: torch.from_numpy(np.ascontiguousarray(rows[name][0]))
            for name in ("tokens", "labels")
        }


def accelerated(setting: Setting) -> None:
    from accelerate import Accelerator

    rounds, gpu = setting.plan.batch.accumulation_steps, setting.device.type == "cuda"
    accelerator = Accelerator(
        mixed_precision="bf16",
        gradient_accumulation_steps=rounds,
        dynamo_backend="inductor",
        cpu=not gpu,
    )
    model = Answer(model_of(setting)).to(setting.device)
    loader = torch.utils.data.DataLoader(
        Rows(setting),
        batch_size=setting.plan.batch.micro_batch_size,
        pin_memory=gpu,
        num_workers=2 if gpu else 0,
    )
    prepared, optimizer, loader = accelerator.prepare(model, adamw(model, setting), loader)
    clock = Clock(setting)
    for rows in loader:
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(**rows)["loss"])
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(prepared.parameters(), setting.config.optimizer.clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if accelerator.sync_gradients:
            clock.tick()


def trainer(setting: Setting) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    clock, fields, gpu = Clock(setting), setting.config.optimizer, setting.device.type == "cuda"

    class Ticks(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.tick()

    arguments = TrainingArguments(
        output_dir=str(setting.home / "trainer"),
        per_device_train_batch_size=setting.plan.batch.micro_batch_size,
        gradient_accumulation_steps=setting.plan.batch.accumulation_steps,
        max_steps=setting.total,
        bf16=True,
        torch_compile=True,
        optim="adamw_torch_fused",
        learning_rate=fields.lr,
        weight_decay=fields.weight_decay,
        max_grad_norm=fields.clip,
        adam_beta1=fields.betas[0],
        adam_beta2=fields.betas[1],
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        dataloader_num_workers=2 if gpu else 0,
        dataloader_pin_memory=gpu,
        use_cpu=not gpu,
        remove_unused_columns=False,
        disable_tqdm=True,
        average_tokens_across_devices=False,
    )
    Trainer(
        model=Answer(model_of(setting)),
        args=arguments,
        train_dataset=Rows(setting),
        callbacks=[Ticks()],
    ).train()


def samecurve_fp8(setting: Setting) -> None:
    samecurve(setting, float8=True)


SIDES: dict[str, Side] = {
    "samecurve": Side(samecurve),
    "plain": Side(plain),
    "trainer": Side(trainer, "accelerate", "bench"),
    "accelerate": Side(accelerated, "accelerate", "bench"),
    "samecurve-fp8": Side(samecurve_fp8, "torchao", "fp8"),
}
