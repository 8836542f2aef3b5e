"""Models and their hooks, as people write them."""

import itertools
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from common import Base, net, summed
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from samecurve import Mean


class HookCount(Base):
    """A forward hook that damps every seventh call."""

    def model(self):
        calls = itertools.count(1)
        model = net()
        model[1].register_forward_hook(lambda m, i, out: out * 0.5 if next(calls) % 7 == 0 else out)
        return model


class RowGradientClip(Base):
    """Clips the gradient of each row of an activation by its norm: harmless but for the scale."""

    def loss(self, model, batch):
        hidden = model[1](model[0](batch["x"]))
        if hidden.requires_grad:
            hidden.register_hook(lambda g: g / g.norm(dim=1, keepdim=True).clamp(min=0.05) * 0.05)
        out = model[2](hidden)
        return Mean(summed(out, batch["y"]), len(out))


class GradientNormalised(Base):
    """Divides the gradient of an activation by its norm over the batch."""

    def loss(self, model, batch):
        hidden = model[1](model[0](batch["x"]))
        if hidden.requires_grad:
            hidden.register_hook(lambda g: g / g.norm())
        out = model[2](hidden)
        return Mean(summed(out, batch["y"]), len(out))


class MaskedGradient(Base):
    """A hook of a parameter keeps half of its rows as they are: harmless."""

    def model(self):
        model = net()
        mask = (torch.arange(16) % 2).double()[:, None]
        model[0].weight.register_hook(lambda g: g * mask.to(g.dtype))
        return model


class ClampedGradient(Base):
    """A hook of a parameter clamps its gradient."""

    def model(self):
        model = net()
        model[0].weight.register_hook(lambda g: g.clamp(-0.05, 0.05))
        return model


class ClampedAfterAccumulation(Base):
    """A hook after accumulation clamps the gradient that a parameter has."""

    def model(self):
        model = net()

        def clamp(parameter):
            parameter.grad.clamp_(-0.05, 0.05)

        model[0].weight.register_post_accumulate_grad_hook(clamp)
        return model


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).T


class Parametrized(Base):
    """A symmetric weight by torch.nn.utils.parametrize: harmless."""

    def model(self):
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        parametrize.register_parametrization(model[0], "weight", Symmetric())
        return model


class WeightNorm(Base):
    """Weight norm by parametrization, with its cache on: harmless."""

    def model(self):
        model = net()
        nn.utils.parametrizations.weight_norm(model[0])
        return model

    def loss(self, model, batch):
        with parametrize.cached():
            out = model(batch["x"]) + model(batch["x"] * 0.5)
        return Mean(summed(out, batch["y"]), len(out))


class LateSpectralNorm(Base):
    """Old spectral norm, whose layer is used from step 3 on: harmless. Until then no pass moves its
    buffers, and its attribute `weight` is a view of the weight, which a hook makes anew.
    """

    def model(self):
        layers = {"first": nn.Linear(8, 8), "late": nn.Linear(8, 8), "last": nn.Linear(8, 3)}
        nn.utils.spectral_norm(layers["late"])
        return nn.ModuleDict(layers)

    def loss(self, model, batch, step):
        hidden = model["first"](batch["x"]).tanh()
        if step >= 3:
            hidden = model["late"](hidden)
        out = model["last"](hidden)
        return Mean(summed(out, batch["y"]), len(out))


class Pruned(Base):
    """A mask by torch.nn.utils.prune, made in model(): harmless."""

    def model(self):
        model = net()
        prune.l1_unstructured(model[0], "weight", amount=0.3)
        return model


class ViewKept(Base):
    """A flat view of a weight, kept when the model is made, is penalised."""

    def model(self):
        class Viewed(nn.Module):
            def __init__(self):
                super().__init__()
                self.net = net()
                self.flat = [p.view(-1) for p in self.net.parameters()]

            def forward(self, x):
                return self.net(x)

        return Viewed()

    def loss(self, model, batch):
        out = model(batch["x"])
        decay = sum(flat.square().sum() for flat in model.flat)
        return Mean(summed(out, batch["y"]) + 0.1 * decay * len(out), len(out))


class DetachedViewKept(Base):
    """A detached view of a weight, kept when the model is made, scales the loss."""

    def model(self):
        model = net()
        model.flat = [model[0].weight.detach().view(-1)]
        return model

    def loss(self, model, batch):
        out = model(batch["x"]) * (1 + model.flat[0].norm())
        return Mean(summed(out, batch["y"]), len(out))


class LazyBuffer(Base):
    """A mask that forward makes at its first call and registers: harmless."""

    def model(self):
        class Masked(nn.Module):
            def __init__(self):
                super().__init__()
                self.net = net()

            def forward(self, x):
                if not hasattr(self, "mask"):
                    self.register_buffer("mask", (torch.arange(x.shape[1]) % 3 != 0).to(x))
                return self.net(x * self.mask)

        return Masked()


class LazyLayer(Base):
    """A layer that forward makes at its first call."""

    def model(self):
        class Growing(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.head = nn.Linear(8, 16), None

            def forward(self, x):
                hidden = torch.tanh(self.inner(x))
                if self.head is None:
                    self.head = nn.Linear(hidden.shape[1], 3).to(x)
                return self.head(hidden)

        return Growing()


class HiddenBuffer(Base):
    """A buffer outside of the checkpoint gathers the inputs' mean and is used."""

    def model(self):
        class Centred(nn.Module):
            def __init__(self):
                super().__init__()
                self.net = net()
                self.register_buffer("mean", torch.zeros(8), persistent=False)

            def forward(self, x):
                if self.training:
                    with torch.no_grad():
                        self.mean.lerp_(x.mean(0), 0.1)
                return self.net(x - self.mean)

        return Centred()


class DecayingBuffer(Base):
    """A buffer outside of the checkpoint decays with each forward pass."""

    def model(self):
        class Decaying(nn.Module):
            def __init__(self):
                super().__init__()
                self.net = net()
                self.register_buffer("noise", torch.ones(()), persistent=False)

            def forward(self, x):
                if self.training:
                    self.noise *= 0.97
                return self.net(x) * (1 + self.noise)

        return Decaying()


class RunningNorm(Base):
    """A running standard deviation of its own, a plain tensor in an attribute."""

    def model(self):
        class Normed(nn.Module):
            def __init__(self):
                super().__init__()
                self.net = net()
                self.deviation = torch.ones(8)

            def forward(self, x):
                if self.training and len(x) > 1:
                    self.deviation = 0.9 * self.deviation.to(x) + 0.1 * x.std(0).detach()
                return self.net(x / self.deviation.to(x))

        return Normed()


class CheckpointCount(Base):
    """A checkpointed block that counts its calls, which recomputation calls again."""

    def model(self):
        class Counted(nn.Module):
            def __init__(self):
                super().__init__()
                self.net, self.calls = net(), 0

            def block(self, x):
                self.calls += 1
                return self.net(x) / (1 + 0.01 * (self.calls // 6))

            def forward(self, x):
                return checkpoint(self.block, x, use_reentrant=False)

        return Counted()


class CheckpointDropout(Base):
    """Dropout in a checkpointed block: harmless."""

    def model(self):
        class Dropped(nn.Module):
            def __init__(self):
                super().__init__()
                self.net = net()

            def forward(self, x):
                run = lambda x: self.net(F.dropout(x, 0.3, self.training))  # noqa: E731
                return checkpoint(run, x, use_reentrant=False)

        return Dropped()


class InPlaceInput(Base):
    """Normalises the batch's rows in place."""

    def loss(self, model, batch):
        x = batch["x"]
        x.sub_(x.mean(1, keepdim=True)).mul_(2)
        out = model(x)
        return Mean(summed(out, batch["y"]), len(out))


class PoppedLabel(Base):
    """Takes the labels out of the batch and puts another thing in."""

    def loss(self, model, batch):
        y = batch.pop("y")
        batch["x"] = batch["x"] * 2
        out = model(batch["x"])
        return Mean(summed(out, y), len(out))


class Quantise(torch.autograd.Function):
    largest = 0.0

    @staticmethod
    def forward(ctx, x):
        Quantise.largest = max(Quantise.largest, float(x.abs().max()))
        step = Quantise.largest / 7
        return (x / step).round() * step

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class QuantiseRange(Base):
    """Fake quantisation whose range, the largest value seen, lies in an autograd function."""

    def loss(self, model, batch):
        out = model[2](Quantise.apply(model[1](model[0](batch["x"]))))
        return Mean(summed(out, batch["y"]), len(out))


@torch.library.custom_op("strangers::focal", mutates_args=())
def focal(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return -(out.log_softmax(-1).gather(1, y[:, None])[:, 0])


def keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def back(ctx, gradient):
    out, y = ctx.saved_tensors
    return gradient[:, None] * (out.softmax(-1) - F.one_hot(y, 3)), None


focal.register_autograd(back, setup_context=keep)


class CustomOp(Base):
    """A loss as an operator of its own, row by row: harmless."""

    def loss(self, model, batch):
        return Mean(focal(model(batch["x"]), batch["y"]).sum(), len(batch["y"]))


@torch.library.custom_op("strangers::centred", mutates_args=())
def centred(out: torch.Tensor) -> torch.Tensor:
    return out - out.mean(0)


centred.register_autograd(lambda ctx, g: g - g.mean(0))


class MixingOp(Base):
    """An operator of its own that subtracts the batch's mean."""

    def loss(self, model, batch):
        out = centred(model(batch["x"]))
        return Mean(summed(out, batch["y"]), len(out))


class Adversarial(Base):
    """Each row moved along its own gradient first: harmless."""

    def loss(self, model, batch):
        x = batch["x"].clone().requires_grad_()
        if not torch.is_grad_enabled():
            return super().loss(model, batch)
        (gradient,) = torch.autograd.grad(summed(model(x), batch["y"]), x)
        out = model(x.detach() + 0.1 * gradient.sign())
        return Mean(summed(out, batch["y"]), len(out))


class EvalTarget(Base):
    """Its own output without dropout is the target: the loss sets the mode and puts it back."""

    def model(self):
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))

    def loss(self, model, batch):
        model.eval()
        with torch.no_grad():
            target = model(batch["x"])
        model.train()
        out = model(batch["x"])
        return Mean(summed(out, batch["y"]) + (out - target).square().sum(), len(out))


class SeededNoise(Base):
    """Seeds torch in the loss, for the same noise in each step."""

    def loss(self, model, batch):
        torch.manual_seed(7)
        out = model(batch["x"] + 0.1 * torch.randn_like(batch["x"]))
        return Mean(summed(out, batch["y"]), len(out))


class RareClusters(Base):
    """An adaptive softmax, registered before the layers below, of which rows need some clusters."""

    def model(self):
        class Words(nn.Module):
            def __init__(self):
                super().__init__()
                self.out = nn.AdaptiveLogSoftmaxWithLoss(16, 30, [3, 10, 20], div_value=2.0)
                self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16))

            def forward(self, x, y):
                return self.out(self.body(x), y).output

        return Words()

    def loss(self, model, batch):
        y = torch.where(batch["id"] == 4, 25, torch.where(batch["id"] == 7, 14, batch["y"]))
        return Mean(-model(batch["x"], y).sum(), len(y))


class LateBuffer(Base):
    """A buffer that one rare sample moves."""

    def model(self):
        class Counting(nn.Module):
            def __init__(self):
                super().__init__()
                self.net = net()
                self.register_buffer("seen", torch.ones(()))

            def forward(self, x, ids):
                if (ids == 17).any():
                    self.seen.mul_(0.5)
                return self.net(x) * float(self.seen)

        return Counting()

    def loss(self, model, batch):
        out = model(batch["x"], batch["id"])
        return Mean(summed(out, batch["y"]), len(out))


class BufferOfALaterStep(Base):
    """A buffer that comes to be in mid-run, and keeps what the weights were."""

    def loss(self, model, batch, step):
        if step == 4 and not hasattr(model[0], "begun"):
            model[0].register_buffer("begun", model[0].weight.detach().clone())
        out = model(batch["x"])
        begun = getattr(model[0], "begun", None)
        pull = 0.0 if begun is None else (model[0].weight - begun).square().sum()
        return Mean(summed(out, batch["y"]) + pull * len(out), len(out))


class BufferOnceLow(LateBuffer):
    """A buffer that moves at each pass with a low loss."""

    def loss(self, model, batch):
        out = model(batch["x"], batch["y"] * 0)
        total = summed(out, batch["y"])
        if float(total.detach()) / len(out) < 0.8:
            model.seen.mul_(0.9)
        return Mean(total, len(out))


class WeightAsNumpy(Base):
    """The size of a weight, as numpy tells it: the array shares the weight's memory."""

    def loss(self, model, batch):
        size = np.abs(model[0].weight.detach().numpy()).sum()
        out = model(batch["x"]) / (1 + 0.01 * float(size))
        return Mean(summed(out, batch["y"]), len(out))


class Unpack(torch.autograd.Function):
    """A product with packed weights, which backward unpacks again."""

    @staticmethod
    def forward(ctx, x, codes, scales):
        ctx.save_for_backward(codes, scales)
        return x @ (codes.to(x.dtype) * scales.to(x.dtype))

    @staticmethod
    def backward(ctx, gradient):
        codes, scales = ctx.saved_tensors
        return gradient @ (codes.to(gradient.dtype) * scales.to(gradient.dtype)).T, None, None


class PackedBlock(nn.Module):
    def __init__(self):
        super().__init__()
        codes = torch.randint(-9, 9, (8, 8)).to(torch.int8)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(torch.rand(8) / 20, requires_grad=False)
        self.down, self.up = nn.Linear(8, 2), nn.Linear(2, 8)

    def forward(self, x):
        return torch.tanh(Unpack.apply(x, self.codes, self.scales) + self.up(self.down(x)))


class PackedBase(Base):
    """Small trained layers beside packed ones that stay as they are."""

    def model(self):
        return nn.Sequential(*(PackedBlock() for _ in range(3)), nn.Linear(8, 3))


class AdaptedBlock(nn.Module):
    """A frozen layer with a small trained one beside it, computed again in backward but for the
    products.
    """

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.requires_grad_(requires_grad=False)
        self.down, self.up = nn.Linear(8, 2), nn.Linear(2, 8)

    def inner(self, x):
        x = torch.tanh(self.first(x))
        return torch.tanh(self.second(x) + self.up(self.down(x)))

    def forward(self, x):
        keep_products = partial(
            create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default]
        )
        return checkpoint(self.inner, x, use_reentrant=False, context_fn=keep_products)


class AdaptedBase(Base):
    """Gradients of the trained layers come before backward is done with the frozen ones."""

    def model(self):
        return nn.Sequential(*(AdaptedBlock() for _ in range(3)), nn.Linear(8, 3))


class Centred(nn.Module):
    """A running mean that each device keeps for itself, in no state_dict()."""

    def __init__(self):
        super().__init__()
        self.net = net()
        self.register_buffer("centre", torch.zeros(8), persistent=False)

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.centre.lerp_(x.mean(0), 0.1)
        return self.net(x - self.centre.clone())


class CoupledCentre(Base):
    def model(self):
        return nn.Sequential(nn.BatchNorm1d(8), Centred())
