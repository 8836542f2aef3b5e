"""Four examples of the gallery beside loops of torch alone, in one process, over whole batches, in
float64, which are given the noise that the samples' keys make.
"""

import importlib.util
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from samecurve.core.determinism.data_order import Order
from samecurve.core.determinism.sample_keys import RowKeys
from samecurve.torch_engine.model.model_setup import seeded
from samecurve.torch_engine.randomness.keyed_numbers import KeyedNumbers, Tables
from starts import start, train
from test_gallery import ROOT, example
from worlds import Pool

STEPS, SAMPLES, BATCH, LR = 8, 50, 18, 1e-3  # epochs end with 14
BETAS = (0.9, 0.95)
OPTIMIZERS = {"moco": {"clip": 0.0}}  # the others have the config's


def steps_of(data: Any) -> Iterator[tuple[dict[str, torch.Tensor], RowKeys]]:
    """The rows of each step in float64, and what their noise is keyed by."""
    order = Order(SAMPLES, BATCH, seed=0)
    for step, ids in enumerate(order.ids(range(STEPS))):
        rows = {name: torch.from_numpy(np.asarray(column)) for name, column in data[ids].items()}
        batch = {name: x.double() if x.is_floating_point() else x for name, x in rows.items()}
        yield batch, RowKeys(seed=0, epoch=order.epoch_of(step), step=step, ids=ids)


def noise(keys: RowKeys, width: int) -> torch.Tensor:
    """The first draw of a microbatch's forward pass."""
    numbers = KeyedNumbers(torch.from_numpy(keys.values), Tables())
    return numbers.normal(0, [width], torch.float64)


def adamw(module: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(module.parameters(), lr=LR, betas=BETAS, weight_decay=0.0)


def update(loss: torch.Tensor, module: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    module.zero_grad()
    torch.autograd.backward(loss)
    nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def plain_vae(task: Any) -> list[float]:
    model = task.model().double()
    optimizer, losses = adamw(model), []
    for step, (batch, keys) in enumerate(steps_of(task.train_data())):
        picture = batch["picture"]
        mean, log_var = model.encoder(picture).chunk(2, 1)
        drawn = model.decoder(mean + noise(keys, mean.shape[1]) * torch.exp(log_var / 2))
        error = F.binary_cross_entropy_with_logits(drawn, picture, reduction="none").sum(1)
        kl = 0.5 * (mean**2 + log_var.exp() - log_var - 1).sum(1)
        losses.append(update((error + step / 100 * kl).mean(), model, optimizer))
    return losses


def plain_gan(task: Any) -> list[float]:
    """The discriminator's losses."""
    model = task.model().double()
    critic, generator = model["critic"], model["generator"]
    optimizers, losses = (adamw(critic), adamw(generator)), []
    for batch, keys in steps_of(task.train_data()):
        with torch.no_grad():
            fake = generator(noise(keys, 8))
        apart = F.softplus(-critic(batch["x"])) + F.softplus(critic(fake))
        losses.append(update(apart.mean(), critic, optimizers[0]))
        fooled = F.softplus(-critic(generator(noise(keys.of_phase(1), 8))))
        update(fooled.mean(), generator, optimizers[1])
    return losses


def plain_clip(task: Any) -> list[float]:
    model = task.model().double()
    optimizer, losses = adamw(model), []
    for batch, _ in steps_of(task.train_data()):
        pictures, captions = model(batch["picture"], batch["caption"])
        scores, own = model.scale.exp() * pictures @ captions.T, torch.arange(len(pictures))
        loss = (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2
        losses.append(update(loss, model, optimizer))
    return losses


def plain_moco(task: Any) -> list[float]:
    """The queue is a buffer in which keys are written over the oldest."""
    model, losses = task.model().double(), []
    optimizer, queue = torch.optim.AdamW(model.query.parameters(), lr=LR), model.queue.detach()
    for step, (batch, _) in enumerate(steps_of(task.train_data())):
        queries, keys = F.normalize(model.query(batch["one"])), model.key(batch["two"])
        keys = F.normalize(keys.detach())
        scores = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ queue.T], 1) / 0.2
        loss = F.cross_entropy(scores, torch.zeros(len(keys), dtype=torch.int64))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
        queue[(step * BATCH + torch.arange(len(keys))) % len(queue)] = keys
        momentum = min(0.99, (1 + step) / (10 + step))
        for slow, fast in zip(model.key.parameters(), model.query.parameters(), strict=True):
            slow.data = slow.data * momentum + fast.data * (1 - momentum)
    return losses


@pytest.mark.parametrize(
    ("name", "plain"),
    [("vae", plain_vae), ("gan", plain_gan), ("clip", plain_clip), ("moco", plain_moco)],
)
def test_an_example_is_a_plain_loop(
    name: str, plain: Callable[[Any], list[float]], pool: Pool, tmp_path: Path
) -> None:
    """On three ranks, two microbatches each at most, to 1e-12."""
    values = {
        **example(name).model_dump(),
        "batch": {"samples": BATCH, "per_device": 4},
        "optimizer": {"lr": LR, **OPTIMIZERS.get(name, {"betas": BETAS, "weight_decay": 0.0})},
        "schedule": {"decay": "constant"},
        "train": {"steps": STEPS, "precision": "f64"},
        "devices": {"use": "cpu:3", "preflight": 0},
    }
    file = tmp_path / f"{name}.py"
    file.write_text(_with_samples((ROOT / "examples" / f"{name}.py").read_text()))
    if values["data"]:
        values["data"]["samples"] = SAMPLES
    values["task"] = f"{file}:{values['task'].rpartition(':')[2]}"
    losses = train(pool, start(tmp_path / "run", values, tmp_path / "cache"))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    task_class = getattr(module, values["task"].rpartition(":")[2])
    task = task_class(**{key: values[key] for key in inspect.signature(task_class).parameters})
    with seeded(0):
        expected = plain(task)
    assert losses == pytest.approx(expected, rel=1e-12)


def _with_samples(code: str) -> str:
    """With so many samples that an epoch ends within the steps, and a queue comes round."""
    code = code.replace("BATCH, QUEUE = 64, 512", f"BATCH, QUEUE = {BATCH}, {4 * BATCH}")
    return code.replace("return 2000", f"return {SAMPLES}")
