"""Tasks whose loops are not the plainest, in a file of their own as a user's are."""

import copy
import random
from typing import Any

import numpy as np
import torch
from torch import nn

from samecurve import Mean

SAMPLES = 23  # in tens: an epoch's tail of 3


class Rows:
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, ids: Any) -> dict[str, Any]:
        x = np.stack([np.random.default_rng(int(i)).normal(size=6) for i in ids])
        return {"x": x, "y": np.tanh(x.sum(1)), "weight": 1.0 + ids % 3}


class Base:
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def train_data(self) -> Rows:
        return Rows()


class Annealed(Base):
    """A penalty that comes with the steps and goes with the epochs; logged beside the loss, as is
    what only some samples count for.
    """

    fault = False  # it forgets one of them

    def loss(self, model: Any, batch: Any, step: int, epoch: int) -> dict[str, Mean]:
        out, weight = model(batch["x"])[:, 0], batch["weight"]
        share = min(1.0, step / 6) * 0.5**epoch
        error = (out - batch["y"]) ** 2 + share * out**2
        means = {
            "penalty": Mean((weight * out**2).sum(), weight.sum()),
            "above": Mean(out[out > 0].sum(), (out > 0).sum()),
        }
        if self.fault and len(out) == 3:
            del means["above"]
        return {**means, "loss": Mean((weight * error).sum(), weight.sum())}

    def eval_data(self) -> Rows:
        return Rows()


class Forgetful(Annealed):
    fault = True


class Clipped(Annealed):
    """Clips its weights once in a while, in place or through `.data`."""

    def __init__(self, data: Any) -> None:
        self.at, self.by_data = data["at"], data["by_data"]

    def loss(self, model: Any, batch: Any, step: int, epoch: int) -> dict[str, Mean]:
        if step == self.at:
            with torch.no_grad():
                weight = model[2].weight.data if self.by_data else model[2].weight
                weight.clamp_(-0.01, 0.01)
        return super().loss(model, batch, step, epoch)


class Predictor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.head = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.body:
            x = torch.tanh(layer(x))
        return self.head(x)[:, 0]  # type: ignore[no-any-return]


class Taught(nn.Module):
    """A student, a teacher that follows it, and an average of its last layer in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.student = Predictor()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("average", self.student.head.weight.detach().clone())


class Momentum(Base):
    def model(self) -> nn.Module:
        return Taught()

    def loss(self, model: Any, batch: Any) -> Mean:
        out = model.student(batch["x"])
        with torch.no_grad():
            taught = model.teacher(batch["x"]) + (batch["x"] @ model.average.T)[:, 0]
        return Mean(((out - batch["y"]) ** 2 + 0.5 * (out - taught) ** 2).sum(), len(out))

    def after_step(self, model: Any, step: int) -> None:
        student = dict(model.student.named_parameters())
        for name, parameter in model.teacher.named_parameters():
            parameter.lerp_(student[name], 1 / (step + 2))
        model.average.lerp_(model.student.head.weight, 0.1)


class Restless(Momentum):
    """Noise at each third step: from torch, numpy and Python."""

    def after_step(self, model: Any, step: int) -> None:
        if step % 3 == 2:
            weight = model.student.head.weight
            weight += 0.01 * torch.randn_like(weight) + 0.01 * float(np.random.rand())
            model.average += 0.01 * random.random()


class Seeded(Momentum):
    """Draws from a generator of its own, in its third step."""

    def __init__(self) -> None:
        self.noise = np.random.default_rng(0)

    def after_step(self, model: Any, step: int) -> None:
        if step == 2:
            model.average += 0.01 * self.noise.normal()


class Thawing(Annealed):
    """Its first layer comes frozen, and the loss thaws it."""

    def model(self) -> nn.Module:
        model = super().model()
        next(model.children()).requires_grad_(False)
        return model

    def loss(self, model: Any, batch: Any, step: int, epoch: int) -> dict[str, Mean]:
        if step == 3:
            model[0].requires_grad_(True)
        return super().loss(model, batch, step, epoch)


class Unfreezing(Annealed):
    """Its first layer is frozen until the fourth step."""

    def loss(self, model: Any, batch: Any, step: int, epoch: int) -> dict[str, Mean]:
        model[0].requires_grad_(step >= 3)
        return super().loss(model, batch, step, epoch)


class Lazy(Annealed):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.Linear(8, 1))


class Remembering(Annealed):
    """Keeps what a run must go on with: a margin that grows, and the last steps, in a small array.
    The log is for the eye alone: each rank has another one.
    """

    def __init__(self) -> None:
        self.margin, self.last = 0.0, np.zeros(3)
        self.log: list[float] = []

    def loss(self, model: Any, batch: Any, step: int, epoch: int) -> dict[str, Mean]:
        means = super().loss(model, batch, step, epoch)
        self.log.append(means["loss"].sum.item())
        total, weight = means["loss"]
        return {**means, "loss": Mean(total * (1 + self.margin + float(self.last.sum())), weight)}

    def after_step(self, model: Any, step: int) -> None:  # noqa: ARG002 - by its signature
        self.margin += 0.1
        self.last[step % 3] = 0.1 * step


class Ensemble(Annealed):
    """Reads in an epoch what it gathered in the one before, of the samples that a rank has had."""

    def __init__(self) -> None:
        self.outputs: dict[float, torch.Tensor] = {}

    def loss(self, model: Any, batch: Any, step: int, epoch: int) -> dict[str, Mean]:
        means, out = super().loss(model, batch, step, epoch), model(batch["x"])
        keys = batch["y"].tolist()
        rows: dict[float, torch.Tensor] = dict(zip(keys, out.detach(), strict=True))
        before = torch.stack([{**rows, **self.outputs}[key] for key in keys])
        self.outputs |= rows
        total, weight = means["loss"]
        return {**means, "loss": Mean(total + (out - before).square().sum(), weight)}


class Aside(Base):
    """Keeps its teacher, and a head, beside the model."""

    learns_head = False

    def __init__(self) -> None:
        self.teachers = {"slow": nn.Linear(6, 1).double().requires_grad_(False)}
        self.head = nn.Linear(1, 1).double().requires_grad_(self.learns_head)
        self.seen = torch.zeros(1)  # which no loss reads

    def loss(self, model: Any, batch: Any) -> Mean:
        out = self.head(model(batch["x"]))[:, 0]
        pull = out - self.teachers["slow"](batch["x"])[:, 0]
        return Mean(((out - batch["y"]) ** 2 + 0.5 * pull**2).sum(), len(out))

    def after_step(self, model: Any, step: int) -> None:  # noqa: ARG002 - by its signature
        self.seen += 1


class TaughtAside(Aside):
    def after_step(self, model: Any, step: int) -> None:  # noqa: ARG002 - by its signature
        self.teachers["slow"].weight.lerp_(model[0].weight[:1], 0.1)


class HeadAside(Aside):
    learns_head = True


class Halved(Annealed):
    def schedule(self, step: int) -> float:
        return float(0.5 ** (step // 3))


class Scheduled(Annealed):
    """By schedulers one after the other."""

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        schedulers = torch.optim.lr_scheduler
        warm = schedulers.LinearLR(optimizer, start_factor=0.1, total_iters=3)
        cosine = schedulers.CosineAnnealingLR(optimizer, T_max=5, eta_min=1e-3)
        return schedulers.SequentialLR(optimizer, [warm, cosine], milestones=[3])


class Plateau(Annealed):
    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)


class Cycled(Annealed):
    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=50)


class Short(Annealed):
    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=1.0, total_steps=5, cycle_momentum=False
        )


class Negative(Annealed):
    def schedule(self, step: int) -> float:
        return 4.5 - step


class Unasked(Annealed):
    def schedule(self, epoch: int) -> float:
        return 1 / epoch


class Lambda(Annealed):
    def optimizer(self, params: Any, lr: float) -> Any:
        optimizer = torch.optim.SGD(params, lr=lr)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return optimizer


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 6))
        self.critic = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


class Adversarial(Base):
    """Critic, then generator; the second half of a sample is its noise."""

    phases = {"critic": "critic.*", "generator": ("generator.*",)}

    def model(self) -> nn.Module:
        return Gan()

    def loss(self, model: Any, batch: Any, phase: str) -> Mean | dict[str, Mean]:
        real, count = batch["x"], len(batch["x"])
        made = model.generator(real[:, 3:])
        soft = nn.functional.softplus
        if phase == "critic":
            error = soft(-model.critic(real)) + soft(model.critic(made.detach()))
            return Mean(error.sum(), count)
        error = soft(-model.critic(made))
        return {"loss": Mean(error.sum(), count), "size": Mean((made**2).sum(), count)}


class TwoOptimizers(Adversarial):
    elementwise = True

    def optimizer(self, params: Any, lr: float, phase: str) -> Any:
        if phase == "critic":
            return torch.optim.Adam(params, lr=lr, betas=(0.5, 0.9))
        return torch.optim.RMSprop(params, lr=lr / 2)


class Noisy(Adversarial):
    """It notes what it draws."""

    def __init__(self) -> None:
        self.drawn: list[torch.Tensor] = []

    def loss(self, model: Any, batch: Any, phase: str) -> Any:
        self.drawn.append(torch.randn_like(batch["x"]))
        return super().loss(model, batch, phase)
