"""Tokens a second, MFU and memory of a Llama of the transformers library on one GPU: ours, HF
Trainer, Accelerate and, where it imports, torchtune, in turn. Not measured on a GPU yet.

    python -m benchmarks.hf                          # where there is a GPU: 1B, all weights
    python -m benchmarks.hf --case 8b-lora           # 8B, recompute, LoRA of rank 16
    python -m benchmarks.hf_gpu --device cpu --tiny --batch 8 --turns 1 --warm 2 --steps 3
                                                     # the same paths without a GPU, in about two
                                                     # minutes: says nothing of speed

All in bf16 autocast, by fused AdamW, clipped at the same norm, in the same microbatch and rounds,
on random tokens in rows of 2048; recompute by block, where the case has it. Weights are f32; of an
adapter's base the others hold bf16, as their pages advise; torchtune holds all weights in bf16, as
its recipes do. Turns, failures, MFU, profiles and results: as benchmarks/gpu.py has them. Writes
benchmarks/results/hf-gpu-<machine>-<case>.json.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import torchtune_side
from benchmarks.common import config_of
from benchmarks.gpu_main import Race, check, parser_of, race
from benchmarks.gpu_profile import PROFILED
from benchmarks.gpu_result import version
from benchmarks.sides import Clock, Setting, samecurve
from samecurve.core.planning.planner import plan
from samecurve.core.system.installation import install_command
from samecurve.probe import probe
from samecurve.tasks import open_task

_LLAMA = {
    "architecture": "llama",
    "vocab_size": 128_256,
    "num_key_value_heads": 8,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
}
_TINY = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_ADAPTER = {"kind": "lora", "rank": 16, "alpha": 32, "target": "all-linear"}


@dataclass(frozen=True)
class Case:
    """A case. adapter: LoRA in place of all weights; recompute: by block."""

    hidden: int
    intermediate: int
    layers: int
    tied: bool
    adapter: bool
    recompute: bool

    def model(self, *, tiny: bool) -> dict[str, Any]:
        fields = {
            **_LLAMA,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "tie_word_embeddings": self.tied,
        }
        return fields | (_TINY if tiny else {})


CASES = {
    "1b": Case(2048, 8192, 16, tied=True, adapter=False, recompute=False),
    "8b-lora": Case(4096, 14336, 32, tied=False, adapter=True, recompute=True),
}


def setting_of(arguments: argparse.Namespace, home: Path) -> Setting:
    """The plan and task of a case. UserError: the plan refuses the case."""
    case = CASES[arguments.case]
    fields = case.model(tiny=arguments.tiny)
    config = config_of(
        {
            "task": "huggingface",
            "model": fields | ({"adapter": _ADAPTER} if case.adapter else {}),
            "data": {
                "source": "random",
                "seq_len": 64 if arguments.tiny else 2048,
                "samples": 4096,
                "validation": 0,
            },
            "batch": {"samples": arguments.batch, "per_device": arguments.micro},
            "optimizer": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1, "clip": 1.0},
            "schedule": {"warmup": 1, "decay": "constant"},
            "train": {
                "steps": arguments.warm + arguments.steps + PROFILED,
                "precision": "bf16",
                "compile": True,
                "exact": False,  # as the other sides
                "recompute": "block" if case.recompute else "none",
            },
            "devices": {
                "use": "0" if arguments.device == "cuda" else "cpu",
                "strategy": "single",
            },
        }
    )
    task = open_task(config, home / "cache")
    made = plan(config, probe(), task.facts())
    torch.set_num_threads(made.compute.threads)
    device = torch.device(made.layout.devices[0].place)
    return Setting(task, config, made, device, home, arguments.warm, arguments.steps)


def others_model(arguments: argparse.Namespace, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    case = CASES[arguments.case]
    fields = {k: v for k, v in case.model(tiny=arguments.tiny).items() if k != "architecture"}
    config: Any = LlamaConfig(**fields, use_cache=False)
    auto: Any = AutoModelForCausalLM
    torch.manual_seed(0)
    dtype = torch.bfloat16 if case.adapter else torch.float32
    with device:
        model = auto.from_config(config, dtype=dtype)
    if not case.adapter:
        return model
    from peft import LoraConfig, get_peft_model

    model.enable_input_require_grads()
    adapter = LoraConfig(
        r=_ADAPTER["rank"],  # type: ignore[arg-type]
        lora_alpha=_ADAPTER["alpha"],  # type: ignore[arg-type]
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, adapter)


class Rows(torch.utils.data.Dataset[Any]):
    """A data set of single samples, for torch's loaders."""

    def __init__(self, setting: Setting) -> None:
        self._data = setting.task.train_data()
        self._count = setting.total * setting.plan.batch.global_batch_size

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        rows = self._data[np.asarray([index % len(self._data)])]
        return {name: torch.from_numpy(rows[name][0]) for name in ("input_ids", "labels")}


def ours(setting: Setting, arguments: argparse.Namespace) -> None:
    del arguments  # all of it stands in the setting
    samecurve(setting)


def trainer(setting: Setting, arguments: argparse.Namespace) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    clock, fields, gpu = Clock(setting), setting.config.optimizer, setting.device.type == "cuda"

    class Ticks(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.tick()

    options = TrainingArguments(
        output_dir=str(setting.home / "trainer"),
        per_device_train_batch_size=setting.plan.batch.micro_batch_size,
        gradient_accumulation_steps=setting.plan.batch.accumulation_steps,
        max_steps=setting.total,
        bf16=True,
        torch_compile=True,
        gradient_checkpointing=CASES[arguments.case].recompute,
        gradient_checkpointing_kwargs={"use_reentrant": False},
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
        disable_tqdm=True,
    )
    model = others_model(arguments, setting.device)
    Trainer(model=model, args=options, train_dataset=Rows(setting), callbacks=[Ticks()]).train()


def _accelerated(setting: Setting, arguments: argparse.Namespace) -> tuple[Any, ...]:
    """Prepare Accelerate: (accelerator, model, optimizer, loader)."""
    from accelerate import Accelerator

    gpu = setting.device.type == "cuda"
    accelerator = Accelerator(
        mixed_precision="bf16",
        gradient_accumulation_steps=setting.plan.batch.accumulation_steps,
        dynamo_backend="inductor",
        cpu=not gpu,
    )
    model = others_model(arguments, setting.device)
    model.train()
    if CASES[arguments.case].recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    fields = setting.config.optimizer
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=fields.lr, betas=fields.betas, weight_decay=fields.weight_decay, fused=True
    )
    loader: Any = torch.utils.data.DataLoader(
        Rows(setting),
        batch_size=setting.plan.batch.micro_batch_size,
        pin_memory=gpu,
        num_workers=2 if gpu else 0,
    )
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def _counted(batches: Iterator[Any], rounds: int) -> Iterator[tuple[list[Any], Any]]:
    """Group microbatches by step, with the number of labels that count in the step."""
    while parts := [batch for _, batch in zip(range(rounds), batches, strict=False)]:
        yield parts, sum(part["labels"][:, 1:].ne(-100).sum() for part in parts)


def accelerate(setting: Setting, arguments: argparse.Namespace) -> None:
    accelerator, model, optimizer, loader = _accelerated(setting, arguments)
    clock, rounds = Clock(setting), setting.plan.batch.accumulation_steps
    for parts, counted in _counted(iter(loader), rounds):
        for part in parts:
            accelerator.backward(model(**part, num_items_in_batch=counted).loss * rounds)
        accelerator.clip_grad_norm_(model.parameters(), setting.config.optimizer.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        clock.tick()


def torchtune(setting: Setting, arguments: argparse.Namespace) -> None:
    case = CASES[arguments.case]
    torchtune_side.torchtune(
        setting,
        fields=case.model(tiny=arguments.tiny),
        recompute=case.recompute,
        rows=Rows(setting),
    )


SIDES: dict[str, Callable[..., None]] = {
    "samecurve": ours,
    "trainer": trainer,
    "accelerate": accelerate,
    "torchtune": torchtune,
}


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, SIDES)
    parser.add_argument("--case", choices=list(CASES), default="1b")
    parser.add_argument("--batch", type=int, default=32, help="rows of a step")
    parser.add_argument("--micro", type=int, default=4, help="rows at once, on every side")
    arguments = parser.parse_args(words)
    check(parser, arguments, SIDES)
    if arguments.batch % arguments.micro:
        parser.error("--batch must be a multiple of --micro: the others know rounds of one size")
    return arguments


def main(words: Sequence[str] | None = None) -> None:
    words = sys.argv[1:] if words is None else words
    arguments = parsed(words)
    chosen = arguments.sides.split(",")
    skipped = {}
    if version("accelerate") is None:
        reason = f"accelerate is not installed ({install_command('bench')})"
        skipped = {name: reason for name in chosen if name in {"trainer", "accelerate"}}
    if "torchtune" in chosen:
        why_not = torchtune_side.why_not(adapter=CASES[arguments.case].adapter)
        skipped |= {"torchtune": why_not} if why_not else {}
    race(
        Race(
            module="benchmarks.hf_gpu",
            kind="hf-gpu",
            case=arguments.case,
            words=words,
            arguments=arguments,
            setting_of=partial(setting_of, arguments),
            runs={name: partial(run, arguments=arguments) for name, run in SIDES.items()},
            skipped=skipped,
        )
    )


if __name__ == "__main__":
    main()
