"""What a loss may not do itself, in the places that docs/task-recipes.md names."""

import torch
import torch.nn.functional as F
from common import Base, Rows, net, summed
from torch import nn

from samecurve import Mean

CODES, WIDTH = 6, 4


class MaxNorm(Base):
    def model(self):
        return nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 3))

    def loss(self, model, batch):
        out = model(batch["id"] % 20)
        return Mean(summed(out, batch["y"]), len(out))

    def after_step(self, model, step):
        model[0].weight.renorm_(2, 0, 1.0)


class WeightClipping(Base):
    def after_step(self, model, step):
        for parameter in model.parameters():
            parameter.clamp_(-0.1, 0.1)


class TargetNetwork(Base):
    def model(self):
        return nn.ModuleDict({"online": net(), "target": net().requires_grad_(False)})

    def loss(self, model, batch):
        out, wanted = model["online"](batch["x"]), model["target"](batch["x"])
        return Mean(summed(out, batch["y"]) + (out - wanted).square().sum(), len(out))

    def after_step(self, model, step):
        if (step + 1) % 3 == 0:
            model["target"].load_state_dict(model["online"].state_dict())


class Pruning(Base):
    def model(self):
        model = net()
        model[0].register_buffer("mask", torch.ones(16, 8))
        return model

    def after_step(self, model, step):
        layer = model[0]
        if step == 4:
            layer.mask.copy_(layer.weight.abs() > layer.weight.abs().median())
        layer.weight.mul_(layer.mask)


class Curriculum(Base):
    def loss(self, model, batch, step):
        out = model(batch["x"])
        seen = step * 8
        return Mean(summed(out, batch["y"]) + min(1.0, seen / 60) * out.square().sum(), len(out))


class Whole:
    """A task without a loss of single samples."""

    elementwise = True

    def model(self):
        return net()

    def train_data(self):
        return Rows()


class MemoryBank(Whole):
    phases = {"train": "net.*", "remember": "bank"}

    def model(self):
        class Remembering(nn.Module):
            def __init__(self):
                super().__init__()
                self.net, self.bank = net(), nn.Parameter(torch.zeros(37, 3))

        return Remembering()

    def features(self, model, batch, phase):
        out, old = model.net(batch["x"]), model.bank[batch["id"]]
        if phase == "remember":  # after the update
            return {"out": out.detach(), "old": old}
        error = F.cross_entropy(out, batch["y"], reduction="none")
        return {"error": error + (out - old.detach()).square().sum(1)}

    def batch_loss(self, features, phase):
        if phase == "train":
            return Mean(features["error"].sum(), len(features["error"]))
        difference = (features["old"] - features["out"]).square().sum()
        return Mean(0.5 * difference * len(features["out"]), len(features["out"]))

    def optimizer(self, params, lr, phase):  # a rate of 1 replaces the rows
        return torch.optim.SGD(params, lr=1.0 if phase == "remember" else lr)


class Codebook(Whole):
    phases = {"train": ("encoder.*", "decoder.*"), "codes": ("count", "total")}

    def model(self):
        class Quantised(nn.Module):
            def __init__(self):
                super().__init__()
                self.encoder, self.decoder = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 3)
                self.count = nn.Parameter(torch.ones(CODES))
                self.total = nn.Parameter(torch.randn(CODES, WIDTH))

        return Quantised()

    def features(self, model, batch, phase):
        z = model.encoder(batch["x"])
        codes = (model.total / model.count[:, None]).detach()
        nearest = F.one_hot(torch.cdist(z, codes).argmin(1), CODES).to(z.dtype)
        if phase == "codes":
            return {
                "nearest": nearest,
                "sum": nearest[:, :, None] * z.detach()[:, None],
                "count": model.count.expand(len(z), -1),
                "total": model.total.expand(len(z), -1, -1),
            }
        code = nearest @ codes
        out = model.decoder(z + (code - z).detach())
        error = F.cross_entropy(out, batch["y"], reduction="none")
        return {"error": error + (z - code).square().sum(1)}

    def batch_loss(self, features, phase):
        if phase == "train":
            return Mean(features["error"].sum(), len(features["error"]))
        count = (features["count"][0] - features["nearest"].sum(0)).square().sum()
        total = (features["total"][0] - features["sum"].sum(0)).square().sum()
        return Mean(0.5 * (count + total) * len(features["sum"]), len(features["sum"]))

    def optimizer(self, params, lr, phase):  # a momentum of 0.9
        return torch.optim.SGD(params, lr=0.1 if phase == "codes" else lr)


class Detector(Whole):
    def features(self, model, batch):
        out = model(batch["x"])
        has_box = (batch["y"] > 0).to(out.dtype)
        return {
            "error": F.cross_entropy(out, batch["y"], reduction="none"),
            "distance": (out.sum(1) - batch["x"].sum(1)).abs() * has_box,
            "boxes": has_box,
        }

    def batch_loss(self, features):
        count = len(features["error"])
        boxes = features["boxes"].sum().clamp(min=1)
        loss = features["error"].mean() + 5 * features["distance"].sum() / boxes
        return Mean(loss * count, count)


class Dice(Whole):
    def features(self, model, batch):
        logits, mask = model(batch["x"]), F.one_hot(batch["y"], 3)
        p, mask = logits.sigmoid(), mask.to(logits.dtype)
        error = F.binary_cross_entropy_with_logits(logits, mask, reduction="none")
        return {"error": error.mean(1), "both": (p * mask).sum(1), "either": (p + mask).sum(1)}

    def batch_loss(self, features):
        count = len(features["error"])
        dice = 1 - (2 * features["both"].sum() + 1) / (features["either"].sum() + 1)
        return Mean(features["error"].sum() + dice * count, count)
