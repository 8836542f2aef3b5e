"""Losses that follow other losses, optimizers, schedules and data, as people write them."""

import copy
import random

import numpy as np
import torch
import torch.nn.functional as F
from common import SAMPLES, Base, Rows, summed

from samecurve import Mean


class LossBranch(Base):
    """Adds a penalty once the batch's loss is below a bound."""

    def loss(self, model, batch):
        out = model(batch["x"])
        total = summed(out, batch["y"])
        easy = float(total.detach()) / len(out) < 0.95
        return Mean(total + 0.5 * easy * out.square().sum(), len(out))


class AccuracyGate(Base):
    """Trains the first layer only where the batch's accuracy is above a half."""

    def loss(self, model, batch):
        hidden = model[1](model[0](batch["x"]))
        out = model[2](hidden)
        if (out.argmax(1) == batch["y"]).double().mean() < 0.5:
            out = model[2](hidden.detach())
        return Mean(summed(out, batch["y"]), len(out))


class EverySeventh(Base):
    """Subtracts the batch's mean at every seventh step."""

    def loss(self, model, batch, step):
        out = model(batch["x"])
        if step % 7 == 5:
            out = out - out.mean(0)
        return Mean(summed(out, batch["y"]), len(out))


class SecondEpoch(Base):
    """Weighs classes by their number in the batch, from the third epoch on."""

    def loss(self, model, batch, epoch):
        out, y = model(batch["x"]), batch["y"]
        if epoch < 2:
            return Mean(summed(out, y), len(out))
        weight = 1.0 / torch.bincount(y, minlength=3).clamp(min=1).to(out)
        return Mean(F.cross_entropy(out, y, weight, reduction="sum"), len(out))


class NumpyShuffle(Base):
    """Mixes rows with others of the batch, in an order seeded by the step."""

    def loss(self, model, batch, step):
        order = np.random.RandomState(step).permutation(len(batch["x"]))
        out = model(0.8 * batch["x"] + 0.2 * batch["x"][order])
        return Mean(summed(out, batch["y"]), len(out))


class LastLoss(Base):
    """Scales the loss by how much it fell since the last call."""

    def __init__(self):
        self.last = None

    def loss(self, model, batch):
        out = model(batch["x"])
        total = summed(out, batch["y"])
        now = float(total.detach()) / len(out)
        scale = 1.0 if self.last is None else now / self.last
        self.last = now
        return Mean(total * scale, len(out))


class SkippingAdam(torch.optim.Adam):
    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        if self.count % 3 == 0:
            return None
        return super().step(closure)


class OptimizerSkips(Base):
    """An optimizer that leaves out every third step."""

    elementwise = True

    def optimizer(self, params, lr):
        return SkippingAdam(params, lr)


class CautiousSGD(torch.optim.SGD):
    largest = 0.0

    @torch.no_grad()
    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
        norm = float(getattr(norm, "full_tensor", lambda: norm)())
        if norm <= 1.3 * self.largest or not self.largest:
            super().step(closure)
        self.largest = 0.9 * self.largest + 0.1 * norm


class OptimizerByNorm(Base):
    """An optimizer that leaves out steps with a gradient larger than usual."""

    elementwise = True

    def optimizer(self, params, lr):
        return CautiousSGD(params, lr=lr)


class RateInLoss(Base):
    """Weight decay in the loss, times the optimizer's learning rate."""

    elementwise = True

    def optimizer(self, params, lr):
        self.rates = torch.optim.SGD(params, lr=lr)
        return self.rates

    def loss(self, model, batch):
        out = model(batch["x"])
        rate = self.rates.param_groups[0]["lr"] if hasattr(self, "rates") else 0.0
        decay = sum(p.square().sum() for p in model.parameters())
        return Mean(summed(out, batch["y"]) + rate * decay * len(out), len(out))


class RateByLoss(Base):
    """A schedule that halves the rate once the last loss is low."""

    def __init__(self):
        self.last = 9.0

    def schedule(self, step):
        return 1.0 if self.last > 1.0 else 0.5

    def loss(self, model, batch):
        mean = super().loss(model, batch)
        self.last = float(mean.sum.detach()) / mean.weight
        return mean


class CachedRows(Rows):
    def __init__(self):
        super().__init__(count=300)
        self.cache = {}
        self.rng = np.random.default_rng(5)

    def __getitem__(self, ids):
        for i in ids:
            if int(i) not in self.cache:
                row = super().__getitem__([i])
                row["x"] = row["x"] + self.rng.normal(scale=0.3, size=(1, 8))
                self.cache[int(i)] = row
        rows = [self.cache[int(i)] for i in ids]
        return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}


class CachedAugmentation(Base):
    """A row is augmented when it is first read, and then kept."""

    def train_data(self):
        return CachedRows()


class TurningRows(Rows):
    reads = 0

    def __getitem__(self, ids):
        rows = super().__getitem__(ids)
        TurningRows.reads += len(ids)
        return rows | {"x": -rows["x"]} if TurningRows.reads > 4 * SAMPLES else rows


class CountedReads(Base):
    """Data that changes after some epochs, by the number of rows read."""

    def train_data(self):
        return TurningRows()


class EpochShuffle(Rows):
    def __getitem__(self, ids, epoch):
        rows = super().__getitem__(ids)
        order = list(range(8))
        random.Random(epoch).shuffle(order)
        return rows | {"x": rows["x"][:, order]}


class ShuffledColumns(Base):
    """Columns in another order each epoch, seeded by it: harmless."""

    def train_data(self):
        return EpochShuffle()


class DepthByRandom(Base):
    """Leaves out a layer by Python's random, as stochastic depth does."""

    def loss(self, model, batch):
        hidden = batch["x"] if random.random() < 0.3 else batch["x"].tanh()
        out = model(hidden)
        return Mean(summed(out, batch["y"]), len(out))


class SharpnessAware(Base):
    """The loss at weights moved along the batch's own gradient."""

    def loss(self, model, batch):
        names = dict(model.named_parameters())
        if not torch.is_grad_enabled():
            return super().loss(model, batch)
        total = summed(model(batch["x"]), batch["y"])
        gradients = torch.autograd.grad(total, list(names.values()))
        moved = {n: p + 0.05 * g.detach().sign() for (n, p), g in zip(names.items(), gradients)}
        out = torch.func.functional_call(model, moved, (batch["x"],))
        return Mean(summed(out, batch["y"]), len(out))


class SlowWeights(Base):
    """Lookahead in after_step, with its slow weights in a closure."""

    def __init__(self):
        slow = []

        def look(model, step):
            if not slow:
                slow.extend(p.clone() for p in model.parameters())
            if step % 4 == 3:
                for old, p in zip(slow, model.parameters()):
                    p.copy_(old.lerp_(p, 0.5))

        self.look = look

    def after_step(self, model, step):
        self.look(model, step)


class FreezesLate(Base):
    """Freezes the first layer for good from step 6 on."""

    def loss(self, model, batch, step):
        if step >= 6:
            model[0].requires_grad_(False)
        return super().loss(model, batch)


class Unfreezes(Base):
    """The first layer is frozen until step 4."""

    def loss(self, model, batch, step):
        model[0].requires_grad_(step >= 4)
        return super().loss(model, batch)


class LateTeacher(Base):
    """A teacher that is copied at step 4."""

    teacher = None

    def loss(self, model, batch, step):
        out = model(batch["x"])
        total = summed(out, batch["y"])
        if step >= 4:
            if self.teacher is None:
                self.teacher = copy.deepcopy(model).requires_grad_(False)
            total = total + (out - self.teacher(batch["x"])).square().sum()
        return Mean(total, len(out))


class FunctionalInner(Base):
    """One inner step of MAML for each sample, by torch.func.functional_call."""

    def loss(self, model, batch):
        if not torch.is_grad_enabled():
            return super().loss(model, batch)
        weights, total = dict(model.named_parameters()), 0.0
        for x, y in zip(batch["x"].split(1), batch["y"].split(1)):
            inner = summed(torch.func.functional_call(model, weights, (x,)), y)
            gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
            fast = {n: w - 0.1 * g for (n, w), g in zip(weights.items(), gradients)}
            total = total + summed(torch.func.functional_call(model, fast, (0.9 * x,)), y)
        return Mean(total, len(batch["x"]))


class ForgetsMoments(Base):
    """A loss that empties the optimizer's state once it is high."""

    elementwise = True

    def optimizer(self, params, lr):
        self.adam = torch.optim.Adam(params, lr=lr)
        return self.adam

    def loss(self, model, batch, step):
        if step == 5:
            for state in self.adam.state.values():
                state["exp_avg"].zero_()
        return super().loss(model, batch)


class StepsOfOneLength(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad / (p.grad.norm() + 1e-8))


class NormalisedUpdates(Base):
    """An optimizer whose steps have one length, and that is said to update each number alone."""

    elementwise = True

    def optimizer(self, params, lr):
        return StepsOfOneLength(params, lr=lr)


class RareWeightNoise(Base):
    """Noise on a weight, now and then, through `.data`."""

    def loss(self, model, batch):
        if random.random() < 0.3:
            model[0].weight.data.add_(0.05)
        return super().loss(model, batch)
