"""Losses that keep something, each where an author may put it."""

import contextvars
import functools
import itertools
import os
import random
import sys
import threading
import time
import weakref
from collections import deque
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from common import SAMPLES, Base, Rows, net, summed
from torch import nn

from samecurve import Mean


def counting_loss(every):
    calls = 0

    def penalised(out, y):
        nonlocal calls
        calls += 1
        weight = 0.5 if calls % every == 0 else 0.0
        return summed(out, y) + weight * out.square().sum()

    return penalised


class ClosureCount(Base):
    """A penalty at every ninth call, counted in a closure."""

    def __init__(self):
        self.criterion = counting_loss(9)

    def loss(self, model, batch):
        out = model(batch["x"])
        return Mean(self.criterion(out, batch["y"]), len(out))


class Seen(nn.Module):
    passes = 0

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x):
        Seen.passes += 1
        return self.net(x) / (1.0 + 0.01 * Seen.passes)


class ClassVariable(Base):
    """A temperature that rises with the forward passes, counted in the class."""

    def model(self):
        return Seen()


SCALE = {"loss": 1.0}


class ModuleGlobal(Base):
    """The loss over its running mean, which a global of the file holds."""

    def loss(self, model, batch):
        out = model(batch["x"])
        total = summed(out, batch["y"])
        SCALE["loss"] = 0.9 * SCALE["loss"] + 0.1 * float(total.detach()) / len(out)
        return Mean(total / SCALE["loss"], len(out))


CACHED = {}


class IdCache(Base):
    """Norms of rows, cached by the identity of the batch's array."""

    def loss(self, model, batch):
        x = batch["x"]
        if id(x) not in CACHED:
            CACHED[id(x)] = float(x.norm(dim=1).max())
        out = model(x / CACHED[id(x)])
        return Mean(summed(out, batch["y"]), len(out))


@functools.lru_cache(maxsize=8)
def positions(width, dtype):
    return torch.linspace(0, 1, width, dtype=dtype)


class LruCache(Base):
    """A table by width, cached: harmless."""

    def loss(self, model, batch):
        x = batch["x"]
        out = model(x + positions(x.shape[1], x.dtype))
        return Mean(summed(out, batch["y"]), len(out))


ANCHORS = torch.linspace(-1, 1, 8)


class EpochCache(Base):
    """Targets that the model gives at the first call in an epoch, kept by functools.cache."""

    @functools.cache
    def target(self, model, epoch):
        with torch.no_grad():
            return model(ANCHORS.to(model[0].weight.dtype)).softmax(-1)

    def loss(self, model, batch, epoch):
        out = model(batch["x"])
        pull = (out.softmax(-1) - self.target(model, epoch)).square().sum()
        return Mean(summed(out, batch["y"]) + pull, len(out))


@functools.cache
def prototype(epoch):
    return torch.randn(3, dtype=torch.float64)


class CachedNoise(Base):
    """Noise drawn once an epoch, kept by functools.cache."""

    def loss(self, model, batch, epoch):
        out = model(batch["x"]) + 0.3 * prototype(epoch).to(batch["x"].dtype)
        return Mean(summed(out, batch["y"]), len(out))


class LastLossFile(Base):
    """The temperature is the last loss, read from a file and written to it."""

    def __init__(self):
        self.path = Path(__file__).with_name("last_loss.txt")
        self.path.unlink(missing_ok=True)

    def loss(self, model, batch):
        out = model(batch["x"])
        last = float(self.path.read_text() or 1) if self.path.exists() else 1.0
        total = summed(out / (1 + 0.1 * last), batch["y"])
        self.path.write_text(str(float(total.detach()) / len(out)))
        return Mean(total, len(out))


class LogFile(Base):
    """A line in a file for each call: harmless."""

    def loss(self, model, batch):
        mean = super().loss(model, batch)
        with Path(os.devnull).open("a") as log:
            log.write(f"{float(mean.sum.detach())}\n")
        return mean


class EnvironmentCount(Base):
    """A curriculum by the calls, which an environment variable counts."""

    def loss(self, model, batch):
        calls = int(os.environ.get("CALLS", "0")) + 1
        os.environ["CALLS"] = str(calls)
        out = model(batch["x"])
        hard = 1.0 if calls > 12 else 0.1
        return Mean(summed(out, batch["y"]) + hard * out.square().sum(), len(out))


class RankFromEnvironment(Base):
    """Another noise on each rank, by the environment's RANK."""

    def loss(self, model, batch):
        noise = 0.1 * int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))
        out = model(batch["x"] + noise)
        return Mean(summed(out, batch["y"]), len(out))


class RankFromGroup(Base):
    """Another temperature on each rank, by torch.distributed."""

    def loss(self, model, batch):
        distributed = torch.distributed
        rank = distributed.get_rank() if distributed.is_initialized() else 0
        out = model(batch["x"]) / (1 + rank)
        return Mean(summed(out, batch["y"]), len(out))


class WorldMean(Base):
    """Divides by the world size, as for an all-reduce that adds."""

    def loss(self, model, batch):
        world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        out = model(batch["x"])
        return Mean(summed(out, batch["y"]) / world, len(out))


class WallClock(Base):
    """A temperature that follows time.time()."""

    def loss(self, model, batch):
        out = model(batch["x"]) / (1 + 0.1 * (time.time() % 1))
        return Mean(summed(out, batch["y"]), len(out))


class Deadline(Base):
    """A harder loss after the first 0.3 seconds of training."""

    begun = None

    def loss(self, model, batch, step):
        if step == 1 and Deadline.begun is None:
            Deadline.begun = time.monotonic()
        late = Deadline.begun is not None and time.monotonic() - Deadline.begun > 0.03
        out = model(batch["x"])
        return Mean(summed(out, batch["y"]) + late * out.square().sum(), len(out))


class SetOrder(Base):
    """Weights of classes, in the order in which a set of names is gone through."""

    def __init__(self):
        names = {"cat", "dog", "horse"}
        self.weights = [{"cat": 1.0, "dog": 2.0, "horse": 0.5}[name] for name in names]

    def loss(self, model, batch):
        out = model(batch["x"])
        weights = out.new_tensor(self.weights)
        error = F.cross_entropy(out, batch["y"], weights, reduction="sum")
        return Mean(error, weights[batch["y"]].sum())


class IdOrder(Base):
    """Weights of layers, by the order of their addresses."""

    def loss(self, model, batch):
        out = model(batch["x"])
        layers = sorted((model[0], model[2]), key=id)
        decay = 0.1 * layers[0].weight.square().sum() + 0.01 * layers[1].weight.square().sum()
        return Mean(summed(out, batch["y"]) + decay * len(out), len(out))


NORMS = weakref.WeakKeyDictionary()


class WeakCache(Base):
    """The norm of the first weights that a layer had, kept in a WeakKeyDictionary."""

    def loss(self, model, batch):
        if model not in NORMS:
            NORMS[model] = model[0].weight.detach().norm()
        out = model(batch["x"]) / NORMS[model]
        return Mean(summed(out, batch["y"]), len(out))


TURN = contextvars.ContextVar("TURN", default=0)


class ContextCount(Base):
    """A temperature by the calls, which a context variable counts."""

    def loss(self, model, batch):
        TURN.set(TURN.get() + 1)
        out = model(batch["x"]) / (1 + 0.05 * (TURN.get() // 10))
        return Mean(summed(out, batch["y"]), len(out))


class CycledWeights(Base):
    """A penalty's weight taken from itertools.cycle at each call."""

    def __init__(self):
        self.weights = itertools.cycle([1.0, 1.0, 1.0, 1.0, 0.1])

    def loss(self, model, batch):
        out = model(batch["x"])
        return Mean(summed(out, batch["y"]) * next(self.weights), len(out))


def annealed(first):
    while True:
        yield first
        first *= 0.9


class YieldedWeights(Base):
    """A penalty's weight by a generator function, moved on after each step."""

    def __init__(self):
        self.decay = annealed(1.0)
        self.weight = next(self.decay)

    def after_step(self, model, step):
        self.weight = next(self.decay)

    def loss(self, model, batch):
        out = model(batch["x"])
        return Mean(summed(out, batch["y"]) + self.weight * out.square().sum(), len(out))


class OwnNumpyGenerator(Base):
    """Mixes each row with its reverse, by one draw of a generator of its own."""

    def __init__(self):
        self.rng = np.random.default_rng(0)

    def loss(self, model, batch):
        share = self.rng.beta(0.2, 0.2)
        out = model(share * batch["x"] + (1 - share) * batch["x"].flip(1))
        return Mean(summed(out, batch["y"]), len(out))


def flipper():
    draw = random.Random(3)
    return lambda x: -x if draw.random() < 0.12 else x


class ClosureRandom(Base):
    """Turns a batch's sign once in a while, by a random.Random in a closure."""

    def __init__(self):
        self.flip = flipper()

    def loss(self, model, batch):
        out = model(self.flip(batch["x"]))
        return Mean(summed(out, batch["y"]), len(out))


class StepSmoothing(Base):
    """Label smoothing that follows the step: harmless."""

    def loss(self, model, batch, step):
        out = model(batch["x"])
        smoothing = 0.2 * min(1.0, step / 8)
        error = F.cross_entropy(out, batch["y"], reduction="sum", label_smoothing=smoothing)
        return Mean(error, len(out))


class SeenSamples(Base):
    """A curriculum by the samples seen, counted in the loss."""

    def __init__(self):
        self.seen = 0

    def loss(self, model, batch):
        self.seen += len(batch["x"])
        out = model(batch["x"])
        hard = min(1.0, self.seen / (2 * SAMPLES))
        return Mean(summed(out, batch["y"]) + hard * out.square().sum(), len(out))


HARD = deque(maxlen=12)


class HardQueue(Base):
    """Repels the hardest earlier outputs, which a queue of the file keeps."""

    def loss(self, model, batch):
        out = model(batch["x"])
        error = F.cross_entropy(out, batch["y"], reduction="none")
        repel = sum((out * old.to(out)).sum().tanh() for old in HARD) if HARD else 0.0
        HARD.append(out[error.argmax()].detach())
        return Mean(error.sum() + 0.1 * repel, len(out))


class MemoryBank(Base):
    """Pulls each sample to its output of the epoch before, kept in a dictionary of the module."""

    bank = {}

    def loss(self, model, batch):
        out = model(batch["x"])
        old = [self.bank.get(int(i), row.detach()) for i, row in zip(batch["id"], out)]
        for i, row in zip(batch["id"].tolist(), out.detach()):
            self.bank[i] = row
        return Mean(summed(out, batch["y"]) + (out - torch.stack(old)).square().sum(), len(out))


class DefaultArgument(Base):
    """The last losses, kept in the default value of an argument."""

    def scaled(self, total, count, last=[]):
        scale = sum(last) / len(last) if last else 1.0
        last.append(float(total.detach()) / count)
        del last[:-5]
        return total / scale

    def loss(self, model, batch):
        out = model(batch["x"])
        return Mean(self.scaled(summed(out, batch["y"]), len(out)), len(out))


def temperature():
    temperature.calls = getattr(temperature, "calls", 0) + 1
    return 1.0 if temperature.calls < 25 else 2.0


class FunctionAttribute(Base):
    """A temperature that changes at the 25th call, counted in a function's attribute."""

    def loss(self, model, batch):
        out = model(batch["x"]) / temperature()
        return Mean(summed(out, batch["y"]), len(out))


class OtherModule(Base):
    """The best loss so far, kept in another module (here: sys)."""

    def loss(self, model, batch):
        out = model(batch["x"])
        total = summed(out, batch["y"])
        best = min(getattr(sys, "best_loss", 1e9), float(total.detach()) / len(out))
        sys.best_loss = best
        return Mean(total * (1.0 if best > 0.9 else 0.5), len(out))


class Scripted(nn.Module):
    calls: int

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls % 11 == 0:
            return x * 0.5
        return x


class ScriptCount(Base):
    """A compiled TorchScript module counts its calls."""

    def __init__(self):
        self.damp = torch.jit.script(Scripted())

    def loss(self, model, batch):
        out = self.damp(model(batch["x"]))
        return Mean(summed(out, batch["y"]), len(out))


class BackgroundThread(Base):
    """A thread makes the penalty's weight, a new one every few milliseconds."""

    def __init__(self):
        self.box = [0.0]
        threading.Thread(target=self.work, args=(self.box,), daemon=True).start()

    @staticmethod
    def work(box):
        for turn in range(2000):
            box[0] = 0.5 + 0.5 * np.sin(turn / 50)
            time.sleep(0.005)

    def loss(self, model, batch):
        out = model(batch["x"])
        return Mean(summed(out, batch["y"]) + self.box[0] * out.square().sum(), len(out))


class ClosureTeacher(Base):
    """The first weights as a teacher, copied at the first call into a closure."""

    def __init__(self):
        teacher = None

        def teach(model, x):
            nonlocal teacher
            if teacher is None:
                teacher = [p.detach().clone() for p in model.parameters()]
            w, b, v, c = teacher
            return (x @ w.T + b).tanh() @ v.T + c

        self.teach = teach

    def loss(self, model, batch):
        out = model(batch["x"])
        pull = (out - self.teach(model, batch["x"])).square().sum()
        return Mean(summed(out, batch["y"]) + pull, len(out))


class KeptRows(Rows):
    """Hands out its own memory, as a data set in memory does."""

    def __init__(self):
        super().__init__()
        self.rows = super().__getitem__(range(SAMPLES))

    def __getitem__(self, ids):
        first, count = int(ids[0]), len(ids)
        if list(ids) == list(range(first, first + count)):
            return {name: array[first : first + count] for name, array in self.rows.items()}
        return {name: array[ids] for name, array in self.rows.items()}


class WritesIntoItsRows(Base):
    """A loss that scales its batch in place, with data that hand out their own memory."""

    def train_data(self):
        return KeptRows()

    def loss(self, model, batch):
        batch["x"].mul_(0.5)
        return super().loss(model, batch)
