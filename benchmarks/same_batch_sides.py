"""The sides of benchmarks/same_batch.py: one tiny model of the transformers library on documents of
unlike length, trained by each trainer as its documentation advises, on the ranks that this process
is one of.

    torchrun --standalone --nproc-per-node=2 -m benchmarks.same_batch_sides trainer --case all

prints its losses, a step a line. Microbatches of 6 and a batch of 24 on any number of ranks: 4, 2
or 1 accumulation steps on 1, 2 or 4. The same first weights (a directory that save_pretrained()
wrote), AdamW, constant rate, clipping.

- trainer: Trainer with the model's own loss; tokens averaged across devices, its default.
- trainer, means: the same with average_tokens_across_devices=False.
- accelerate: its guide on gradient accumulation, the part on samples of variable size (targets
  counted over microbatches and processes, then given to the model), and its reproducible sampler.
- accelerate, means: `with accelerator.accumulate(model)` and the model's own mean, the loop of its
  first page.
"""

import argparse
import contextlib
import json
import math
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from samecurve.core.determinism.data_order import Order

MICRO, BATCH, STEPS, LR, CLIP, BETAS = 6, 24, 40, 1e-3, 1.0, (0.9, 0.999)
IGNORED = -100
Rows = list[dict[str, list[int]]]


@dataclass(frozen=True)
class Case:
    """documents: of an epoch; ragged: of unlike length; dropout: of attention; experts: a mixture
    of them with its router's balance loss; ordered: in the order that Samecurve reads them in.
    """

    documents: int
    ragged: bool = False
    dropout: float = 0.0
    experts: bool = False
    ordered: bool = False
    steps: int = STEPS
    micro: int = MICRO

    @property
    def epochs(self) -> int:
        """As many as make all the steps."""
        return self.steps // math.ceil(self.documents / BATCH)


CASES = {
    "all": Case(230, ragged=True, dropout=0.1),
    "none of them": Case(240),
    "one batch": Case(24, ragged=True),
    "ragged documents": Case(240, ragged=True),
    "short tail": Case(230),
    "dropout": Case(240, dropout=0.1),
    "router balance": Case(240, experts=True),
}
ORDERED = "same order"  # on one rank, in one microbatch a step
CASES[ORDERED] = Case(480, ragged=True, ordered=True, steps=20, micro=BATCH)
SEED = 0


@dataclass(frozen=True)
class Curve:
    """losses: as the trainer says them, one a step; model: as it was left."""

    losses: list[float]
    model: nn.Module


def document(number: int, *, ragged: bool) -> str:
    """Sums, written out: one to five of them, or two of one length."""
    lines = []
    for k in range(1 + number % 5 if ragged else 2):
        a, b = (number * 7919 + k) % 1000, (number * 104729 + k) % 10**6
        lines.append(f"{a:03d} and {b:06d} make {a + b:07d}\n")
    return "".join(lines)


def documents(case: Case) -> list[str]:
    return [document(number, ragged=case.ragged) for number in range(case.documents)]


def in_order(case: Case, texts: Sequence[str]) -> list[str]:
    """As one epoch of Samecurve's reads them, where the case asks for it: its rows are numbered by
    their lengths.
    """
    if not case.ordered:
        return list(texts)
    rows = sorted(texts, key=len)
    steps = Order(len(rows), BATCH, SEED).ids(range(case.steps))
    return [rows[i] for i in np.concatenate(steps)]


def write_model(directory: Path, case: Case) -> None:
    """As save_pretrained() writes it, with random weights."""
    from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

    sizes: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
        "attention_dropout": case.dropout,
    }
    config: Any = LlamaConfig(**sizes)
    if case.experts:
        config = MixtralConfig(
            **sizes,
            num_local_experts=4,
            output_router_logits=True,
            router_aux_loss_coef=0.1,
        )
    auto: Any = AutoModelForCausalLM
    torch.manual_seed(0)
    auto.from_config(config).save_pretrained(directory)


def read_model(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory)


def rows_of(texts: Sequence[str]) -> Rows:
    """A token a byte."""
    return [{"input_ids": list(text.encode())} for text in texts]


def padded(rows: Sequence[Mapping[str, list[int]]]) -> dict[str, torch.Tensor]:
    """A microbatch, padded to its longest row."""
    width = max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for at, row in enumerate(rows):
        ids[at, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
        mask[at, : len(row["input_ids"])] = 1
    labels = torch.where(mask == 1, ids, IGNORED)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def accumulation(case: Case) -> int:
    return BATCH // case.micro // world_size()


def quiet() -> None:
    """Bars and notes of the libraries, and warnings of loaders without workers."""
    import transformers.utils

    logging: Any = transformers.utils.logging
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=0.0)


def trainer(case: Case, rows: Rows, home: Path, *, tokens: bool = True) -> Curve:
    from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed
    from transformers.trainer_callback import PrinterCallback

    losses: list[float] = []

    class Steps(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            del args, state, control
            if "loss" in logs:
                losses.append(float(logs["loss"]))

    arguments = TrainingArguments(
        str(home / "trainer"),
        num_train_epochs=case.epochs,
        per_device_train_batch_size=case.micro,
        gradient_accumulation_steps=accumulation(case),
        learning_rate=LR,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        max_grad_norm=CLIP,
        average_tokens_across_devices=tokens,
        train_sampling_strategy="sequential" if case.ordered else "random",
        seed=SEED,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        ddp_backend="gloo" if world_size() > 1 else None,
    )
    set_seed(SEED)
    model = read_model(home / "model")
    each: Any = rows  # a list of samples is a data set
    run = Trainer(
        model=model, args=arguments, train_dataset=each, data_collator=padded, callbacks=[Steps()]
    )
    run.remove_callback(PrinterCallback)
    run.train()
    return Curve(losses, model)


def trainer_means(case: Case, rows: Rows, home: Path) -> Curve:
    return trainer(case, rows, home, tokens=False)


def _accelerated(case: Case, rows: Rows, home: Path) -> tuple[Any, ...]:
    """(accelerator, bare model, model, optimizer, loader)"""
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.utils import set_seed

    set_seed(SEED)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=accumulation(case),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    bare = read_model(home / "model")
    bare.train()
    each: Any = rows
    loader: Any = DataLoader(
        each, batch_size=case.micro, shuffle=not case.ordered, collate_fn=padded
    )
    return accelerator, bare, *accelerator.prepare(bare, adamw(bare), loader)


def accelerate(case: Case, rows: Rows, home: Path) -> Curve:
    accelerator, bare, model, optimizer, loader = _accelerated(case, rows, home)
    rounds, losses = accumulation(case), []
    for _ in range(case.epochs):
        for batches in _of_steps(loader, rounds):
            counted = sum(batch["labels"][:, 1:].ne(IGNORED).sum() for batch in batches)
            counted = accelerator.gather(counted).sum().item()
            parts = []
            for index, batch in enumerate(batches):
                last = index == len(batches) - 1
                waits = not last and accelerator.num_processes > 1
                with model.no_sync() if waits else contextlib.nullcontext():
                    loss = model(**batch, num_items_in_batch=counted).loss
                    loss = loss * rounds * accelerator.num_processes
                    accelerator.backward(loss)
                    parts.append(loss.detach())
            accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            total = accelerator.gather(sum(parts)).sum().item()
            losses.append(total / (accelerator.num_processes * rounds))
    return Curve(losses, bare)


def _of_steps(loader: Any, rounds: int) -> Iterator[list[Any]]:
    """The microbatches of each step; an epoch's last step has those that are left."""
    batches, left = iter(loader), len(loader)
    for _ in range(math.ceil(left / rounds)):
        yield [next(batches) for _ in range(min(rounds, left))]
        left -= rounds


def accelerate_means(case: Case, rows: Rows, home: Path) -> Curve:
    accelerator, bare, model, optimizer, loader = _accelerated(case, rows, home)
    losses, parts = [], []
    for _ in range(case.epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                parts.append(loss.detach())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                losses.append(accelerator.gather(torch.stack(parts)).mean().item())
                parts.clear()
    return Curve(losses, bare)


SIDES: dict[str, Callable[[Case, Rows, Path], Curve]] = {
    "trainer": trainer,
    "trainer, means": trainer_means,
    "accelerate": accelerate,
    "accelerate, means": accelerate_means,
}


def held_out(model: nn.Module, case: Case) -> float:
    """The exact mean loss, per token, over 200 documents that nobody trained on."""
    texts = [document(10_000 + number, ragged=case.ragged) for number in range(200)]
    batch = padded(rows_of(texts))
    labels = batch.pop("labels")[:, 1:]
    model.eval()
    with torch.no_grad():
        logits = model(**batch).logits[:, :-1].flatten(0, 1)
        total = nn.functional.cross_entropy(logits.float(), labels.flatten(), reduction="sum")
    return float(total / labels.ne(IGNORED).sum())


def cases_of(world: int) -> list[str]:
    return [name for name in CASES if world == 1 or name != ORDERED]


def run_cases(side: str, names: Sequence[str], home: Path) -> dict[str, Any]:
    """home: a directory of this rank alone."""
    for name in names:  # first of all: with a process group, save_pretrained() writes on one rank
        write_model(home / name / "model", CASES[name])
    results = {}
    for name in names:
        case = CASES[name]
        rows = rows_of(in_order(case, documents(case)))
        curve = SIDES[side](case, rows, home / name)
        results[name] = {"losses": curve.losses, "held_out": held_out(curve.model, case)}
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=list(SIDES))
    parser.add_argument("--case", choices=list(CASES), help="prints its losses; else every case's")
    parser.add_argument("--into", type=Path, help="a file for each rank's losses in this directory")
    arguments = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    rank = os.environ.get("RANK", "0")
    names = [arguments.case] if arguments.case else cases_of(world_size())
    with tempfile.TemporaryDirectory() as scratch:
        curves = run_cases(arguments.side, names, Path(scratch))
    if arguments.into:
        (arguments.into / f"rank-{rank}.json").write_text(json.dumps(curves))
    elif rank == "0":
        for name, curve_of in curves.items():
            print(f"{arguments.side}, {name}, {world_size()} ranks")
            for step, loss in enumerate(curve_of["losses"], 1):
                print(f"step {step:3d}  loss {loss:.6f}")


if __name__ == "__main__":
    main()
