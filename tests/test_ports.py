"""DPO and an energy-based model with a gradient penalty beside loops that write out the forward
pass and the loss by themselves, in one process, over whole batches, in float64.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import ports
from samecurve.core.determinism.data_order import Order
from samecurve.core.protocols import Source
from samecurve.torch_engine.model.model_setup import seeded
from starts import start, train
from worlds import Pool

STEPS, BATCH, LR, BETAS = 8, 10, 1e-2, (0.9, 0.95)  # epochs end with 5
Weights = dict[str, nn.Parameter]
Rows = dict[str, torch.Tensor]


def batches(data: Source) -> Iterator[Rows]:
    for ids in Order(ports.SAMPLES, BATCH, seed=0).ids(range(STEPS)):
        yield {name: torch.from_numpy(np.asarray(x)) for name, x in data[ids].items()}


def plain_losses(
    loss: Callable[[Weights, Rows], torch.Tensor], weights: Weights, data: Source
) -> list[float]:
    optimizer, losses = torch.optim.AdamW(weights.values(), LR, BETAS, weight_decay=0.0), []
    for batch in batches(data):
        optimizer.zero_grad()
        mean = loss(weights, batch)
        torch.autograd.backward(mean)
        nn.utils.clip_grad_norm_(list(weights.values()), 1.0)
        optimizer.step()
        losses.append(mean.item())
    return losses


def weights_of(module: nn.Module) -> Weights:
    return {
        name: nn.Parameter(value.detach().double()) for name, value in module.named_parameters()
    }


def log_likelihoods(weights: Mapping[str, torch.Tensor], answers: torch.Tensor) -> torch.Tensor:
    """Row by row, without padding."""
    rows = []
    for answer in answers:
        tokens = answer[answer >= 0]
        x = weights["embed.weight"][tokens[:-1]].cumsum(0)
        for layer in ("layers.0", "layers.1"):
            x = x + torch.tanh(x @ weights[f"{layer}.weight"].T + weights[f"{layer}.bias"])
        logits = x @ weights["head.weight"].T + weights["head.bias"]
        likelihoods = torch.exp(logits) / torch.exp(logits).sum(1, keepdim=True)
        rows.append(torch.log(likelihoods[torch.arange(len(x)), tokens[1:]]).sum())
    return torch.stack(rows)


def plain_dpo() -> list[float]:
    """Rafailov et al. 2023, arXiv:2305.18290, equation 7."""
    policy = weights_of(ports.Reader())
    reference = {name: value.detach().clone() for name, value in policy.items()}

    def loss(weights: Weights, batch: Rows) -> torch.Tensor:
        chosen, rejected = (
            log_likelihoods(weights, batch[name]) - log_likelihoods(reference, batch[name])
            for name in ("chosen", "rejected")
        )
        return torch.log(1 + torch.exp(-0.5 * (chosen - rejected))).mean()

    return plain_losses(loss, policy, ports.Pairs())


def energies(weights: Weights, x: torch.Tensor) -> torch.Tensor:
    for layer in ("layers.0", "layers.1"):
        x = x @ weights[f"{layer}.weight"].T + weights[f"{layer}.bias"]
        x = x * torch.sigmoid(x)
    return x @ weights["head.weight"][0] + weights["head.bias"][0]


def slopes(weights: Weights, x: torch.Tensor) -> torch.Tensor:
    """The gradient of the energy with respect to x, by the chain rule."""
    inputs = []
    for layer in ("layers.0", "layers.1"):
        inputs.append(x @ weights[f"{layer}.weight"].T + weights[f"{layer}.bias"])
        x = inputs[-1] * torch.sigmoid(inputs[-1])
    slope = weights["head.weight"].expand(len(x), -1)
    for layer, z in zip(("layers.1", "layers.0"), reversed(inputs), strict=True):
        gate = torch.sigmoid(z)
        slope = slope * (gate + z * gate * (1 - gate)) @ weights[f"{layer}.weight"]
    return slope


def plain_energies() -> list[float]:
    def loss(weights: Weights, batch: Rows) -> torch.Tensor:
        low, high = energies(weights, batch["x"]), energies(weights, batch["other"])
        between = batch["other"] + batch["place"] * (batch["x"] - batch["other"])
        length = (slopes(weights, between) ** 2).sum(1).sqrt()
        total = low - high + 0.1 * low**2 + 0.1 * high**2 + 2.0 * (length - 1) ** 2
        return total.mean()

    return plain_losses(loss, weights_of(ports.Energy()), ports.Points())


PLAIN = {"DPO": plain_dpo, "Energies": plain_energies}
IN_SHORT = {("DPO", "ddp:2"), ("Energies", "fsdp:2")}  # each on ranks, both ways


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=[pytest.mark.long] * ((name, layout) not in IN_SHORT))
        for name in PLAIN
        for layout in ("single:1", "ddp:2", "fsdp:2")
    ],
)
def test_a_port_is_a_plain_loop(name: str, layout: str, pool: Pool, tmp_path: Path) -> None:
    """In four microbatches a step, to 1e-12."""
    strategy, _, count = layout.partition(":")
    values = {
        "task": f"{ports.__file__}:{name}",
        "batch": {"samples": BATCH, "per_device": 3},
        "optimizer": {"lr": LR, "betas": BETAS, "weight_decay": 0.0},
        "schedule": {"decay": "constant"},
        "train": {"steps": STEPS, "precision": "f64"},
        "devices": {"use": f"cpu:{count}", "strategy": strategy, "preflight": 0},
    }
    losses = train(pool, start(tmp_path / "run", values, tmp_path / "cache"))
    with seeded(0):
        expected = PLAIN[name]()
    assert losses == pytest.approx(expected, rel=1e-12)
