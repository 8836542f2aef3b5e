"""Models as people write them: what they do that one in a textbook does not, each the smallest of
its kind, in a file of their own as a user's are.
"""

import warnings
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from samecurve import Mean

WIDTH = 8


class Source:
    """25 rows: batches of 10 leave a tail of 5."""

    def __len__(self) -> int:
        return 25

    def __getitem__(self, ids: Any) -> dict[str, Any]:
        rows = np.stack([np.random.default_rng(int(i)).normal(size=WIDTH) for i in ids])
        return {"x": rows, "y": (rows.sum(1) > 0).astype(np.int64)}


class Plain(nn.Module):
    """Two layers in a list and a head; the others vary it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.head = nn.Linear(WIDTH, 2)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.encode(x))
        return logits


class Scalar(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.turn = nn.Parameter(torch.tensor(1 + 0.5j))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale.exp() * self.turn.abs()


class Containers(Plain):
    """Its blocks are no modules that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(WIDTH, WIDTH), "down": nn.Linear(WIDTH, WIDTH)})
            for _ in range(2)
        )

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer["down"](torch.tanh(layer["up"](x)))  # type: ignore[index]
        return x


class Reentrant(Plain):
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=True))
        return x


class Seldom(Plain):
    """Rows of one sort pass through a layer of their own, here one in six."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = super().forward(x)
        rows = x[:, 0] > 1
        if rows.any():
            logits = logits.index_add(0, rows.nonzero()[:, 0], self.rare(x[rows]))
        return logits


class Skips(Plain):
    """Each of six layers is called only for rows of its own sort; most microbatches skip some."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(6)])

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        sort = (x[:, 0] * 7).floor() % len(self.layers)
        for number, layer in enumerate(self.layers):
            rows = (sort == number).nonzero()[:, 0]
            if len(rows):
                x = x.index_add(0, rows, torch.tanh(layer(x[rows])))
        return x


class AsksWorld(Plain):
    """A model that takes another way where a process group or a wrapper exists."""

    def __init__(self) -> None:
        super().__init__()
        if dist.is_available() and dist.is_initialized():
            self.layers.append(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        is_sharded = any("FSDP" in kind.__name__ for kind in type(self.layers[0]).__mro__)
        return super().forward(x) * world_size * (2 if is_sharded else 1)


class Fourier(Plain):
    """Complex and real weights side by side, in a block and in the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([FourierLayer() for _ in range(2)])
        self.turns = nn.Parameter(torch.polar(torch.ones(WIDTH), torch.arange(float(WIDTH))))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return super().encode((x * self.turns).real)


class FourierLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full([WIDTH // 2 + 1], 1 + 0.5j))
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        filtered = torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=WIDTH)
        mixed: torch.Tensor = self.mix(filtered + self.bias)
        return mixed


class Penalised(Plain):
    """Its loss has a penalty on the gradient of its output, as critics and energy models have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = super().forward(x)
        if not self.training:
            return logits
        between = x.detach().requires_grad_()
        energy = super().forward(between).square().sum()
        (slope,) = torch.autograd.grad(energy, between, create_graph=True)
        return logits + slope.square().mean(1, keepdim=True) * torch.tensor([1.0, -1.0])


class Stack(nn.Module):
    """All of its weights lie in blocks."""

    def __init__(self) -> None:
        super().__init__()
        hidden = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()]
        self.layers = nn.Sequential(*hidden, nn.Linear(WIDTH, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(x)
        return logits


def negatives(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Rows by steps along the gradient of the model's own output, as an energy model draws them.

    The model's weights are frozen meanwhile.
    """
    model.requires_grad_(requires_grad=False)
    for _ in range(2):
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(model(x).square().sum())
        assert x.grad is not None
        x = x - x.grad
    model.requires_grad_()
    return x.detach()


class Chunked(Plain):
    """Rows pass through the layers in chunks of two: a layer is called more often where there are
    more rows. Numbers are drawn, which do nothing here, so that the split check begins with the
    whole batch and a part of one chunk.
    """

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 0.0 * torch.rand_like(x)
        return torch.cat([super(Chunked, self).encode(part) for part in torch.split(x, 2)])


class WithWeight(nn.Linear):
    """Gives its weight beside its result, as a quantizer gives its codebook."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), self.weight.expand(2, -1, -1)


class HandedOn(Plain):
    """Uses the weights of its layers outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([WithWeight(WIDTH, WIDTH) for _ in range(2)])

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        weights = []
        for layer in self.layers:
            x, weight = layer(torch.tanh(x))
            weights.append(weight)
        first, second = weights
        mixed: torch.Tensor = x @ first[0] @ second[1].T
        return mixed


class LayerDrop(Skips):
    """Layers are skipped at random, as wav2vec2's are. The input asks for a gradient, as there."""

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            x.requires_grad = True
        for layer in self.layers:
            is_skipped = self.training and bool(torch.rand([]) < 0.5)
            if not is_skipped:
                x = x + torch.tanh(layer(x))
        return x


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share = self.gate(x).softmax(-1)
        chosen = share.argmax(-1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                result = result.index_add(0, rows, expert(x[rows]) * share[rows, number, None])
        return x + result


class Mixture(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Experts() for _ in range(2)])


class OuterExperts(Plain):
    """The experts are the only list there is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Experts()])


class Frozen(Plain):
    """Two norms with statistics of their own: one is put into eval mode where it is made, one by an
    overridden train().
    """

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleDict({"made": nn.BatchNorm1d(WIDTH), "kept": nn.BatchNorm1d(WIDTH)})
        for norm in self.norms.values():
            norm.register_buffer("running_mean", torch.full([WIDTH], 0.25))
        self.norms["made"].eval()

    def train(self, mode: bool = True) -> "Frozen":  # noqa: FBT001, FBT002 - as nn.Module's
        super().train(mode)
        self.norms["kept"].eval()
        return self

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        assert not self.norms["kept"].training
        return super().encode(self.norms["kept"](self.norms["made"](x)))


class HalfFrozen(Frozen):
    """One norm more, which is in training."""

    def __init__(self) -> None:
        super().__init__()
        self.free = nn.BatchNorm1d(WIDTH)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.free(super().encode(x))  # type: ignore[no-any-return]


class RareNorm(Plain):
    """Rows of one sort need a layer that is a bucket of ddp's by itself, and that backward meets
    before the norm.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.rare = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1 << 15)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        logits = self.head(self.encode(x))
        rows = (x[:, 0] > 1).nonzero()[:, 0]
        if len(rows):
            mean = self.rare(x[rows]).square().mean(1, keepdim=True)
            logits = logits.index_add(0, rows, torch.cat([mean, -mean], 1))
        return logits  # type: ignore[no-any-return]


class Late(Plain):
    """A layer that one row needs, which comes first in step 3 of 6, and a head that none needs."""

    def __init__(self) -> None:
        super().__init__()
        self.rare, self.pooler = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = super().forward(x)
        rows = (x[:, 0] > 1.9).nonzero()[:, 0]
        return logits.index_add(0, rows, self.rare(x[rows])) if len(rows) else logits


class Pretrained(Plain):
    """As from_pretrained() gives it; what is frozen as a whole stays in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.eval()

    @classmethod
    def from_pretrained(cls) -> "Pretrained":
        return cls()


class Backbones(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trained, self.frozen = Pretrained(), Pretrained().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert all(part.training for part in self.trained.modules()) == self.training
        assert not any(part.training for part in self.frozen.modules())
        logits: torch.Tensor = self.trained(x) + self.frozen(x)
        return logits


class Compiled(Plain):
    """By its author, part by part and twice the same."""

    def __init__(self) -> None:
        super().__init__()
        compiled: Any = torch.compile
        self.layers = nn.ModuleList(compiled(layer, backend="eager") for layer in self.layers)
        self.last = self.layers[1]


class Spectral(Plain):
    """Norms of weights, estimated by a step of power iteration in each forward pass, by either of
    torch's ways; and a count of passes, which enters the result.
    """

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        spectral_norm(self.layers[0])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the old way is deprecated, and in use
            nn.utils.spectral_norm(self.layers[1])
        self.register_buffer("count", torch.zeros(()))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.count += 1
        return super().encode(x) / (1 + self.count)


STEP_BUFFERS = {
    "spectral": {
        "count",
        "layers.0.parametrizations.weight.0._u",
        "layers.0.parametrizations.weight.0._v",
        "layers.1.weight_u",
        "layers.1.weight_v",
    }
}  # of kinds: what moves once a step

KINDS: dict[str, type[nn.Module]] = {
    "sampling": Stack,
    "scalar": Scalar,
    "containers": Containers,
    "reentrant": Reentrant,
    "seldom": Seldom,
    "mixture": Mixture,
    "skips": Skips,
    "layer drop": LayerDrop,
    "asks world": AsksWorld,
    "fourier": Fourier,
    "penalised": Penalised,
    "chunked": Chunked,
    "handed on": HandedOn,
    "outer experts": OuterExperts,
    "frozen": Frozen,
    "half frozen": HalfFrozen,
    "rare norm": RareNorm,
    "late": Late,
    "backbones": Backbones,
    "compiled": Compiled,
    "spectral": Spectral,
}


class Task:
    """model.kind: of KINDS, or what the loss does with a Plain one."""

    def __init__(self, model: Any, data: Any) -> None:  # noqa: ARG002 - given by name
        self.kind = model["kind"]

    def model(self) -> nn.Module:
        if self.kind == "dict":
            plain = Plain()
            return nn.ModuleDict({"body": plain.layers[0], "head": plain.head})
        if self.kind == "parallel":
            return nn.DataParallel(Plain())
        if self.kind == "parallel part":
            return nn.ModuleDict({"body": nn.DataParallel(Plain())})
        if self.kind == "ddp":
            return nn.parallel.DistributedDataParallel(Plain())
        if self.kind == "cuda":
            return Plain().cuda()
        if self.kind == "half":
            return Plain().half()
        return KINDS.get(self.kind, Plain)()

    def loss(self, model: Any, batch: Any) -> Mean:
        x, y = batch["x"], batch["y"]
        penalty = 0.0
        if self.kind == "method":
            logits = model.head(model.encode(x))
        elif self.kind == "dict":
            logits = model["head"](torch.tanh(model["body"](x)))
        elif self.kind == "read in block":
            logits = model(x)
            penalty = len(x) * 1e-2 * (model.layers[0].weight * torch.ones(WIDTH, WIDTH)).sum()
        elif self.kind == "read":
            logits = model.encode(x) @ model.head.weight.T + model.head.bias
            penalty = len(x) * 1e-2 * model.head.weight.square().sum()
        elif self.kind == "sampling" and model.training:
            logits = model(x) - model(negatives(model, x))
        else:
            logits = model(x)
        return Mean(cross_entropy(logits, y, reduction="sum") + penalty, len(x))

    def train_data(self) -> Source:
        return Source()

    def eval_data(self) -> Source:
        return Source()


class Own(Task):
    """With an optimizer of its own."""

    elementwise = True

    def optimizer(self, params: Any, lr: float) -> Any:
        return torch.optim.AdamW(params, lr=lr, weight_decay=0.5)


class Phased(Task):
    """Two phases, of which the second uses none of its parameters in the first step."""

    phases = {"body": ("layers.*", "head.*"), "late": ("rare.*", "pooler.*")}

    def loss(self, model: Any, batch: Any, phase: str) -> Mean:  # type: ignore[override]
        del phase
        return super().loss(model, batch)
