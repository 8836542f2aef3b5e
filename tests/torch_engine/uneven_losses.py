"""Losses that do not add up over samples, each as people write it, in a file of their own as a
user's is. The comment `# here` marks the line that is to be named.
"""

import itertools
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samecurve
from samecurve import Mean

# Any: modules, whose attributes no type checker knows
LOSSES: dict[str, Callable[[Any, Mapping[str, Tensor]], Mean]] = {}
MODELS: dict[str, Callable[[], nn.Module]] = {}
WEIGHTS = torch.tensor([1.0, 2.0, 0.5])  # of classes


class Rows:
    def __len__(self) -> int:
        return 40

    def __getitem__(self, ids: Any) -> dict[str, Any]:
        rows = np.stack([np.random.default_rng(int(i)).normal(size=(6, 5)) for i in ids])
        return {"x": rows, "y": ids * 7 % 3, "length": 2 + ids * 5 % 4}


class Net(nn.Module):
    inner: Any
    head: Any
    router: Any
    centre: Any
    steps: Any
    table: Any

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 8)
        self.head = nn.Linear(8, 3)

    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))

    def forward(self, x: Tensor) -> Any:
        return self.head(self.features(x).mean(1))


class Uneven:
    """data.loss: which of LOSSES; its model is that of MODELS by the same name, or Net."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.kind = data["loss"]
        self.calls = 0
        self.rng = np.random.default_rng(0)

    def model(self) -> nn.Module:
        torch.manual_seed(3)
        return MODELS.get(self.kind, Net)()

    def loss(self, model: Any, batch: Mapping[str, Tensor], step: int) -> Any:
        if self.kind == "annealed":
            total, weight = plain(model, batch)
            return Mean(total * min(1.0, 0.5 + step / 10), weight)
        if self.kind in {"late_penalty", "late_draw", "pruned"} and step < 2:
            return plain(model, batch)
        if self.kind == "own_generator":
            factor = 1 + 0.1 * self.rng.normal()  # here: they go on from call to call
            return plain(model, {**batch, "x": batch["x"] * factor})
        return LOSSES.get(self.kind, plain)(model, batch)

    def train_data(self) -> Rows:
        return Rows()


def loss(function: Any) -> Any:
    LOSSES[function.__name__] = function
    return function


def model(name: str) -> Callable[[Any], Any]:
    def named(kind: Any) -> Any:
        MODELS[name] = kind
        return kind

    return named


@loss
def plain(model: Any, batch: Any) -> Any:
    return Mean(F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["x"]))


@loss
def logged(model: Any, batch: Any) -> Any:
    """What is kept of a forward pass and never read is no fault, a counter neither."""
    total, weight = plain(model, batch)
    model.calls = getattr(model, "calls", 0) + 1
    model.last = total.detach(), [float(total)]
    model.accuracy = (model(batch["x"]).argmax(-1) == batch["y"]).double().mean()
    return Mean(total, weight)


@loss
def signed(model: Any, batch: Any) -> Any:
    """Terms of either sign that all but cancel."""
    logits = model(batch["x"])
    return Mean((logits[:, 0] - logits[:, 1]).sum() + 1e4 * (logits - logits).sum(), len(logits))


@loss
def offset(model: Any, batch: Any) -> Any:
    """A sum that float32 rounds by more than its tolerance, and float64 does not."""
    logits = model(batch["x"])
    size = logits[:, 0].square().sum()
    return Mean(size + (logits[:, 0] + 1e3).sum() - 1e3 * len(logits), len(logits))


@loss
def little_mean(model: Any, batch: Any) -> Any:
    """A small term that mixes samples; as an energy model's loss, it takes a gradient itself, and
    its own table in float32 takes no float64.
    """
    x = batch["x"].clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    scores = model(batch["x"]) @ torch.ones(3) + slope.square().flatten(1).sum(1)
    return Mean(scores.square().sum() + 1e-3 * scores.mean(), len(scores))


@loss
def even_only(model: Any, batch: Any) -> Any:
    assert len(batch["x"]) % 2 == 0, "pairs of samples"
    return plain(model, batch)


@loss
def nodes(model: Any, batch: Any) -> Any:
    """Dropout over the nodes of graphs of unlike size, joined into one."""
    joined = torch.arange(6) < batch["length"][:, None]
    hidden = F.dropout(model.features(batch["x"][joined]), 0.5)  # here
    return of_graphs(model, batch, hidden, joined)


@loss
def padded_nodes(model: Any, batch: Any) -> Any:
    """Dropout before the graphs are joined, and by a mask that is drawn padded."""
    joined = torch.arange(6) < batch["length"][:, None]
    hidden = F.dropout(model.features(batch["x"]), 0.5)[joined]
    kept = samecurve.rng(batch).bernoulli(0.9, 6, 8)[joined]
    return of_graphs(model, batch, hidden * kept / 0.9, joined)


def of_graphs(model: Any, batch: Any, nodes: Tensor, joined: Tensor) -> Mean:
    """The loss of graphs, each the sum of its nodes. joined: bool [graphs, places of nodes]"""
    graph = joined.nonzero()[:, 0]  # of each node
    pooled = nodes.new_zeros(len(joined), 8).index_add(0, graph, nodes)
    return Mean(F.cross_entropy(model.head(pooled), batch["y"], reduction="sum"), len(joined))


@loss
def permuted(model: Any, batch: Any) -> Any:
    """mixup"""
    order = torch.randperm(len(batch["x"]))  # here
    return plain(model, {**batch, "x": 0.7 * batch["x"] + 0.3 * batch["x"][order]})


@loss
def numpys(model: Any, batch: Any) -> Any:
    factor = np.sort(np.random.rand(len(batch["x"])))  # here
    each = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return Mean((each * torch.from_numpy(factor)).sum(), len(each))


@loss
def pythons(model: Any, batch: Any) -> Any:
    factors = sorted(random.random() for _ in batch["x"])  # here
    each = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return Mean((each * torch.tensor(factors)).sum(), len(each))


@loss
def mean_for_sum(model: Any, batch: Any) -> Any:
    logits = model(batch["x"])
    mean = F.cross_entropy(logits, batch["y"])  # here
    return Mean(mean, len(batch["x"]))


@loss
def mean_of_tokens_times_rows(model: Any, batch: Any) -> Any:
    """Each microbatch's own mean over its tokens, times its samples."""
    logits = model.head(model.features(batch["x"]))
    real = torch.arange(6) < batch["length"][:, None]
    each = F.cross_entropy(logits.mT, batch["y"][:, None].expand(-1, 6), reduction="none")
    mean = (each * real).sum() / real.sum()  # here
    return Mean(mean * len(real), len(real))


@loss
def weighted_mean_times_rows(model: Any, batch: Any) -> Any:
    weights = WEIGHTS.to(model.head.weight.dtype)
    logits = model(batch["x"])
    mean = F.cross_entropy(logits, batch["y"], weight=weights)  # here
    return Mean(mean * len(logits), len(logits))


@loss
def weight_left_out(model: Any, batch: Any) -> Any:
    return Mean(plain(model, batch).sum, 1)


@loss
def weight_of_pairs(model: Any, batch: Any) -> Any:
    logits = model(batch["x"])
    return Mean(F.cross_entropy(logits, batch["y"], reduction="sum"), len(logits) - 1)


@loss
def contrastive(model: Any, batch: Any) -> Any:
    one = F.normalize(model.features(batch["x"]).mean(1), dim=1)
    two = F.normalize(model(batch["x"]) @ model.head.weight, dim=1)
    similarity = one @ two.T  # here
    labels = torch.arange(len(one))
    return Mean(F.cross_entropy(5 * similarity, labels, reduction="sum"), len(one))


@loss
def balance(model: Any, batch: Any) -> Any:
    """A router's balance, as mixtures of experts have it."""
    routed = model.router(model.features(batch["x"]).mean(1)).softmax(-1)
    chosen = F.one_hot(routed.argmax(-1), 3).to(routed.dtype)
    share = chosen.mean(0)  # here
    balance = 0.01 * 3 * (share * routed.mean(0)).sum()
    total, weight = plain(model, batch)
    return Mean(total + balance * weight, weight)


@loss
def softmax_over_batch(model: Any, batch: Any) -> Any:
    logits = model(batch["x"])
    attention = F.softmax(logits, 0)  # here
    return Mean((attention * logits).sum(), len(logits))


@loss
def penalty(model: Any, batch: Any) -> Any:
    total, weight = plain(model, batch)
    size = sum(p.square().sum() for p in model.parameters())
    return Mean(total + 0.01 * size, weight)  # here


@loss
def counted_by_attribute(model: Any, batch: Any) -> Any:
    """An annealed term, by a counter of its own."""
    total, weight = plain(model, batch)
    model.seen = getattr(model, "seen", 0) + 1
    return Mean(total * min(1.0, 0.5 + model.seen / 100), weight)


@loss
def late_counter(model: Any, batch: Any) -> Any:
    total, weight = plain(model, batch)
    model.seen = getattr(model, "seen", 0) + 1
    return Mean(total * (2.0 if model.seen > 50 else 1.0), weight)


@loss
def counted_by_key(model: Any, batch: Any) -> Any:
    total, weight = plain(model, batch)
    model.log["train.calls"] = model.log.get("train.calls", 0) + 1
    return Mean(total * (2.0 if model.log["train.calls"] > 50 else 1.0), weight)


@loss
def counted_by_list(model: Any, batch: Any) -> Any:
    """By its length, late."""
    model.losses.append(0.0)
    total, weight = plain(model, batch)
    return Mean(total * (2.0 if len(model.losses) > 50 else 1.0), weight)


@loss
def neighbours(model: Any, batch: Any) -> Any:
    each = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    smooth = each + 0.1 * each.roll(1)  # here
    return Mean((smooth * smooth).sum(), len(each))


@model("max_norm")
class MaxNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 5, max_norm=0.5)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x + self.table(torch.arange(6)))  # here


@loss
def clipped_weights(model: Any, batch: Any) -> Any:
    """As the critic of a WGAN."""
    for parameter in model.parameters():
        parameter.data.clamp_(-0.1, 0.1)  # here
    return plain(model, batch)


@loss
def pruned(model: Any, batch: Any) -> Any:
    """At the third step."""
    with torch.no_grad():
        model.head.weight.mul_(model.head.weight.abs() > 0.1)  # here
    return plain(model, batch)


@loss
def late_penalty(model: Any, batch: Any) -> Any:
    """From the third step on."""
    total, weight = plain(model, batch)
    centre = model(batch["x"]).mean(0)  # here
    return Mean(total + centre.square().sum(), weight)


@loss
def two_views(model: Any, batch: Any) -> Any:
    """R-Drop: the same rows twice in one forward pass, each with masks of its own."""
    x, y = batch["x"], batch["y"]
    one, other = model(torch.cat([x, x])).log_softmax(-1).chunk(2)
    errors = sum(F.nll_loss(view, y, reduction="sum") for view in (one, other))
    return Mean(errors + F.kl_div(one, other, log_target=True, reduction="sum"), len(x))


@loss
def many_views(model: Any, batch: Any) -> Any:
    """Two large views and six small ones, as DINO has them, and noise from row to row."""
    x, y = batch["x"], batch["y"]
    features: Any = 0
    for views, tokens in ((2, 6), (6, 2)):
        cut = x[:, :tokens] + 0.1 * torch.rand_like(x[:, :tokens])
        rows = F.dropout(model.features(torch.cat([cut] * views)), 0.3)
        rows = rows * torch.poisson(rows.detach().abs())
        features = features + rows.view(views, len(x), tokens, 8).mean((0, 2))
    return Mean(F.cross_entropy(model.head(features), y, reduction="sum"), len(x))


@loss
def views_of_tokens(model: Any, batch: Any) -> Any:
    """Two views, as rows and as rows of tokens."""
    x, y = batch["x"], batch["y"]
    rows = F.dropout(model.features(torch.cat([x, x])), 0.3).flatten(0, 1)
    rows = F.dropout(rows, 0.3) * torch.empty_like(rows).geometric_(0.5)
    features = rows.view(2, len(x), 6, 8).mean((0, 2))
    return Mean(F.cross_entropy(model.head(features), y, reduction="sum"), len(x))


@loss
def unlike_views_of_tokens(model: Any, batch: Any) -> Any:
    """Two views and six, each as rows of tokens, which no order serves."""
    x, y = batch["x"], batch["y"]
    features: Any = 0
    for views, tokens in ((2, 6), (6, 2)):
        rows = model.features(torch.cat([x[:, :tokens]] * views)).flatten(0, 1)
        features = features + F.dropout(rows, 0.3).view(views, len(x), tokens, 8).mean((0, 2))
    return Mean(F.cross_entropy(model.head(features), y, reduction="sum"), len(x))


@loss
def pairs_of_rows(model: Any, batch: Any) -> Any:
    """DPO with its pairs side by side: chosen and rejected of each sample."""
    x = batch["x"]
    rows = torch.stack([x, -x], 1).flatten(0, 1)
    better, worse = model(rows)[:, 0].view(-1, 2).unbind(1)
    return Mean(-F.logsigmoid(better - worse).sum(), len(x))


@loss
def float32_inside(model: Any, batch: Any) -> Any:
    """As losses that exist in float32 only are called."""
    logits = model(batch["x"]).float()
    total = F.cross_entropy(logits, batch["y"], reduction="sum")
    return Mean(total + 1e3 * (logits[:, 0] - 0.1).sum(), len(logits))


@loss
def coupled_in_float32(model: Any, batch: Any) -> Any:
    """By less than float32 rounds, which it computes too."""
    total, weight = float32_inside(model, batch)
    centre = model(batch["x"]).mean(0)  # here
    return Mean(total + 1e-3 * centre.square().sum(), weight)


@loss
def late_draw(model: Any, batch: Any) -> Any:
    """A draw that has as many rows as some microbatches, and numpy's, from the third step on."""
    noise = torch.randn(10, dtype=torch.float64).mean() + np.random.rand()
    return plain(model, {**batch, "x": batch["x"] * noise})


@loss
def logged_mean(model: Any, batch: Any) -> Any:
    total, weight = plain(model, batch)
    right = model(batch["x"]).argmax(-1) == batch["y"]
    return {"loss": Mean(total, weight), "accuracy": Mean(right.double().mean(), 1)}


@loss
def scaled_backward(model: Any, batch: Any) -> Any:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(_context: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod  # here
        def backward(_context: Any, gradient: Tensor) -> Tensor:
            return gradient / gradient.abs().max()

    logits: Any = Scaled.apply(model(batch["x"]))  # type: ignore[no-untyped-call]
    return Mean(F.cross_entropy(logits, batch["y"], reduction="sum"), len(logits))


@loss
def hooked(model: Any, batch: Any) -> Any:
    logits = model(batch["x"])
    if logits.requires_grad:
        logits.register_hook(lambda gradient: gradient / gradient.norm())  # here
    return Mean(F.cross_entropy(logits, batch["y"], reduction="sum"), len(logits))


@loss
def straight_through(model: Any, batch: Any) -> Any:
    """The value of one term, the gradient of another."""
    features = model.features(batch["x"]).mean(1)
    centred = features - features.mean(0)  # here
    logits = model.head(features.detach() + centred - centred.detach())
    return Mean(F.cross_entropy(logits, batch["y"], reduction="sum"), len(logits))


@model("clamped")
class Clamped(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))  # here


@model("accumulated")
class Accumulated(Net):
    """On the sum of what the microbatches so far gave."""

    def __init__(self) -> None:
        super().__init__()

        def clamp(parameter: Tensor) -> None:  # here
            assert parameter.grad is not None
            parameter.grad.clamp_(-0.01, 0.01)

        self.head.weight.register_post_accumulate_grad_hook(clamp)


@model("masked")
class Masked(Net):
    """A hook of a weight that treats each sample by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight.register_hook(lambda gradient: gradient * torch.arange(8).gt(2))


@model("reversed")
class Reversed(Net):
    """A backward pass of its own, which treats each sample by itself, and hooks that only look."""

    def forward(self, x: Tensor) -> Any:
        class Turned(torch.autograd.Function):
            @staticmethod
            def forward(_context: Any, x: Tensor) -> Tensor:
                return x.clone()

            @staticmethod
            def backward(_context: Any, gradient: Tensor) -> Tensor:
                return -0.3 * gradient

        features = Turned.apply(self.features(x))  # type: ignore[no-untyped-call]
        if features.requires_grad:
            features.register_hook(lambda gradient: gradient.norm() and None)
        return self.head(features.mean(1))


@model("zero_gate")
class ZeroGate(Net):
    """Which nothing passes at the start."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Any:
        logits = super().forward(x)
        centre = logits.mean(0)  # here
        return logits + self.gate * (logits - centre)


@model("counted_by_list")
class Listed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []


@model("balance")
class Routed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 3, bias=False)


@model("norm_by_hand")
class NormByHand(Net):
    def forward(self, x: Tensor) -> Any:
        x = self.features(x).mean(1)
        centre = x.mean(0)  # here
        return self.head((x - centre) / x.std(0))


@model("logging")
@model("counted_by_key")
class Logging(Net):
    """Keeps what it sees by dotted names, as a hook keeps activations by the module's name."""

    def __init__(self) -> None:
        super().__init__()
        self.log: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Any:
        self.log["layers.inner"] = self.features(x).detach()
        self.log["train.calls"] = self.log.get("train.calls", 0) + 1
        return super().forward(x)


@model("cached")
class Cached(Net):
    """A table that grows with what was seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(0), persistent=False)
        self.sizes: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Any:
        if len(self.table) < x.shape[1]:
            self.table = torch.arange(x.shape[1]).to(x.dtype).cos()
        if len(x) not in self.sizes:
            self.sizes[len(x)] = torch.ones(x.shape[1], dtype=x.dtype)
        return super().forward(x * (self.table * self.sizes[len(x)])[:, None])


@model("running_mean")
class RunningMean(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(8))

    def forward(self, x: Tensor) -> Any:
        x = self.features(x).mean(1)
        self.centre = 0.9 * self.centre + 0.1 * x.detach().mean(0)  # here
        return self.head(x - self.centre)


@model("running_mean_by_data")
class RunningMeanByData(RunningMean):
    """As many libraries write it: through .data, which raises no version."""

    def forward(self, x: Tensor) -> Any:
        x = self.features(x).mean(1)
        self.centre.data.mul_(0.9).add_(0.1 * x.detach().mean(0))  # here
        return self.head(x - self.centre)


@model("step_buffer_by_data")
class StepBufferByData(Net):
    """Moves alike whatever the rows, through .data."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.steps.data += 1
        return super().forward(x) * (1 + 1 / (1 + self.steps))


@model("two_views")
@model("pairs_of_rows")
class Dropping(Net):
    """nn.Dropout, and F.dropout that the model calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Any:
        return self.head(F.dropout(self.drop(self.features(x)), 0.2).mean(1))


class Layered(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])


@model("fails_once")
class FailsOnce(Layered):
    """The second backward pass of a process ends in an error, halfway."""

    passes = (itertools.count(1),)  # of a process: no trial puts back what lies in a tuple

    def forward(self, x: Tensor) -> Any:
        x = self.features(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if x.requires_grad:
            x.register_hook(self.fail)  # type: ignore[no-untyped-call]
        return self.head(x.mean(1))

    def fail(self, _gradient: Tensor) -> None:
        if next(self.passes[0]) == 2:
            raise RuntimeError("for once")


@model("asks_how_it_is_sharded")
class AsksForShards(Layered):
    """A model that computes something else where its weights are of another type."""

    def forward(self, x: Tensor) -> Any:
        x = self.features(x)
        for layer in self.layers:
            is_sharded = type(layer.weight) is not nn.Parameter
            x = x + layer(x) * (1.0 if is_sharded else 0.99)
        return self.head(x.mean(1))


@model("step_buffer")
class StepBuffer(Net):
    """Moves alike whatever the rows: no fault of the split by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.steps += 1
        return super().forward(x) * (1 + 1 / (1 + self.steps))


@model("sequence_first")
class SequenceFirst(Net):
    """A statistic over the dimension that holds the samples in [T, B, C]."""

    def forward(self, x: Tensor) -> Any:
        x = self.features(x).transpose(0, 1)
        normed = F.layer_norm(x, x.shape[1:])  # here
        return self.head(normed.mean(0))


@model("batch_scale")
class BatchScale(Net):
    def forward(self, x: Tensor) -> Any:
        x = self.features(x).mean(1)
        largest = x.abs().max()  # here
        return self.head(x / largest)


class Boxes(Rows):
    """Pictures with up to three objects; every 13th has none: labels of class 3 only."""

    def __getitem__(self, ids: Any) -> dict[str, Any]:
        labels = (ids[:, None] + np.arange(4)) % 3
        labels[np.arange(4) > np.where(ids % 13 == 5, -1, ids % 3)[:, None]] = 3
        return {**super().__getitem__(ids), "labels": labels}


class Detector(Uneven):
    """The loss of all boxes by the count of those with an object. data.loss: "at_least_one",
    as detectors have it for a picture alone; "counted"; "divided": nan for a picture without any.
    """

    def loss(self, model: Any, batch: Mapping[str, Tensor], step: int) -> Any:
        del step
        logits = model.head(model.features(batch["x"]))[:, :4]
        each = F.cross_entropy(logits.mT, batch["labels"] % 3, reduction="none")
        positives = (batch["labels"] < 3).sum()
        if self.kind == "at_least_one":
            positives = positives.clamp(min=1)  # here
        if self.kind == "divided":
            return Mean(each.sum() / positives * positives, positives)
        return Mean(each.sum(), positives)

    def train_data(self) -> Rows:
        return Boxes()


class Features:
    """features() and batch_loss() in place of loss. data.loss: "sound", or each row less the mean
    of all.
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.kind = data["loss"]

    def model(self) -> nn.Module:
        torch.manual_seed(3)
        return Net()

    def features(self, model: Any, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        x = model(batch["x"])
        if self.kind == "centred":
            x = x - x.mean(0)  # centre
        return {"x": x, "y": batch["y"]}

    def batch_loss(self, features: Mapping[str, Tensor]) -> Mean:
        x, y = features["x"], features["y"]
        return Mean(F.cross_entropy(x @ x.T, y % len(x), reduction="sum"), len(x))

    def train_data(self) -> Rows:
        return Rows()


class Kept(Uneven):
    """What the loss keeps of a microbatch is read after the step."""

    kept: Tensor

    def loss(self, model: Any, batch: Mapping[str, Tensor], step: int) -> Any:
        self.kept = model(batch["x"]).detach().mean(0)
        return super().loss(model, batch, step)

    def after_step(self, model: Any, step: int) -> None:
        del step
        model.head.bias.data.lerp_(self.kept, 0.1)


class Taught(Uneven):
    """A teacher that the task keeps is in the format in which it was made."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        super().__init__(data)
        self.teacher = nn.Linear(3, 3).requires_grad_(requires_grad=False)


class HandedOn(Uneven):
    """A phase depends on what an earlier one keeps of a microbatch."""

    phases: Mapping[str, str]
    last: float

    def __init__(self, data: Mapping[str, Any]) -> None:
        super().__init__(data)
        self.phases = {"first": "inner.*", "second": "head.*"}

    def loss(self, model: Any, batch: Mapping[str, Tensor], phase: str) -> Any:  # type: ignore[override]
        total, weight = plain(model, batch)
        if phase == "second":
            return Mean(total * (1 + self.last), weight)
        self.last = float(total.detach()) / weight
        return Mean(total, weight)


class BatchLosses(Features):
    """data.loss: what is wrong with batch_loss()."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        super().__init__(data)
        self.calls, self.model_of_features = 0, None

    def features(self, model: Any, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.model_of_features = model
        return super().features(model, batch)

    def batch_loss(self, features: Mapping[str, Tensor], step: int) -> Mean:  # type: ignore[override]
        total, weight = super().batch_loss(features)
        if self.kind == "drawn" and step > 1:
            total = total * torch.rand(())
        if self.kind == "seeded":
            total = total * (1 + np.random.rand())
        if self.kind == "counted":
            self.calls += 1
            total = total * (1 if self.calls < 50 else 2)
        if self.kind == "penalty":
            model: Any = self.model_of_features
            total = total + model.head.weight.square().sum()
        return Mean(total, weight)
