"""Loops of torch alone, in one process and in float64, for losses as strangers write them."""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from stranger_runs import BATCH, FILES, LR, STEPS
from torch import nn

from samecurve.core.determinism.data_order import Order
from samecurve.torch_engine.model.model_setup import seeded


def opened(case: str) -> Any:
    """A task, from a fresh copy of its file's module. case: file.Class"""
    name, _, class_name = case.partition(".")
    sys.path.insert(0, str(FILES))
    try:
        for module in ("common", name):
            sys.modules.pop(module, None)
        task = getattr(importlib.import_module(name), class_name)
        with seeded(0):
            return task()
    finally:
        sys.path.remove(str(FILES))


def steps_of(data: Any) -> Iterator[tuple[int, int, dict[str, torch.Tensor]]]:
    """Number, epoch and rows of each step."""
    order = Order(len(data), BATCH, seed=0)
    for step, ids in enumerate(order.ids(range(STEPS))):
        epoch = order.epoch_of(step)
        has_epoch = "epoch" in inspect.signature(type(data).__getitem__).parameters
        rows = data.__getitem__(ids, epoch) if has_epoch else data[ids]
        yield step, epoch, {name: torch.from_numpy(np.array(x)) for name, x in rows.items()}


def sgd(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=LR)


def update(loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    optimizer.step()
    return loss.item()


def plain(case: str) -> list[float]:
    """The losses of a loop over the task's own loss, as its author would have written it."""
    task, losses = opened(case), []
    with seeded(0):
        model = task.model().double()
    asks, optimizer = inspect.signature(task.loss).parameters, sgd(model)
    for step, epoch, batch in steps_of(task.train_data()):
        progress = {"step": step, "epoch": epoch}
        mean = task.loss(
            model, batch, **{name: progress[name] for name in progress if name in asks}
        )
        losses.append(update(mean.sum / mean.weight, optimizer))
        if hasattr(task, "after_step"):
            with torch.no_grad():
                task.after_step(model, step)
    return losses


def plain_bank() -> list[float]:
    task, losses = opened("places.MemoryBank"), []
    with seeded(0):
        model = task.model().double()
    net, bank = model.net, torch.zeros(37, 3, dtype=torch.float64)
    optimizer = sgd(net)
    for _, _, batch in steps_of(task.train_data()):
        out = net(batch["x"])
        pull = (out - bank[batch["id"]]).square().sum(1).mean()
        losses.append(update(F.cross_entropy(out, batch["y"]) + pull, optimizer))
        bank[batch["id"]] = net(batch["x"]).detach()
    return losses


def plain_codebook() -> list[float]:
    """The codes are moving averages of the vectors that are nearest to them."""
    task, losses = opened("places.Codebook"), []
    with seeded(0):
        model = task.model().double()
    count, total = model.count.detach().clone(), model.total.detach().clone()
    optimizer = sgd(model.encoder, model.decoder)
    for _, _, batch in steps_of(task.train_data()):
        codes, z = total / count[:, None], model.encoder(batch["x"])
        code = codes[torch.cdist(z, codes).argmin(1)]
        out = model.decoder(z + (code - z).detach())
        pull = (z - code).square().sum(1).mean()
        losses.append(update(F.cross_entropy(out, batch["y"]) + pull, optimizer))
        z = model.encoder(batch["x"]).detach()
        nearest = F.one_hot(torch.cdist(z, codes).argmin(1), len(codes)).double()
        count, total = 0.9 * count + 0.1 * nearest.sum(0), 0.9 * total + 0.1 * nearest.T @ z
    return losses


def plain_detector() -> list[float]:
    """Two means, each divided by its own count."""
    task, losses = opened("places.Detector"), []
    with seeded(0):
        model = task.model().double()
    optimizer = sgd(model)
    for _, _, batch in steps_of(task.train_data()):
        out, has_box = model(batch["x"]), batch["y"] > 0
        distance = (out.sum(1) - batch["x"].sum(1)).abs()[has_box].sum() / has_box.sum().clamp(1)
        losses.append(update(F.cross_entropy(out, batch["y"]) + 5 * distance, optimizer))
    return losses


OWN: dict[str, Callable[[], list[float]]] = {
    "places.MemoryBank": plain_bank,
    "places.Codebook": plain_codebook,
    "places.Detector": plain_detector,
}
