"""Tasks whose loss is one of the whole batch, in a file of their own as a user's are."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from samecurve import Mean

TOKENS, EXPERTS = 5, 3


class Source:
    """Views, a class and some tokens of each sample; the same for the same id."""

    def __init__(self, count: int, first: int = 0) -> None:
        self.count, self.first = count, first

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, ids: Any) -> dict[str, Any]:
        drawn = [np.random.default_rng(int(i) + self.first) for i in ids]
        numbers = np.stack([one.normal(size=(2, 6)) for one in drawn])
        tokens = np.stack([one.normal(size=(TOKENS, 6)) for one in drawn])
        return {
            "one": numbers[:, 0],
            "two": numbers[:, 0] + 0.3 * numbers[:, 1],
            "label": np.asarray(ids) % 3,
            "flag": np.asarray(ids) % 2 == 0,
            "tokens": tokens,
            "length": np.asarray(ids) % TOKENS + 1,
        }


class Net(nn.Module):
    """fields: dropout, temperature: whether there is a learned one."""

    def __init__(self, fields: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 8)])
        self.drop = nn.Dropout(fields.get("dropout", 0.0))
        self.head = nn.Linear(8, 4)
        if fields.get("temperature"):
            self.scale = nn.Parameter(torch.tensor([0.7]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.head.weight.dtype)
        for layer in self.layers:
            x = self.drop(torch.tanh(layer(x)))
        return self.head(x)  # type: ignore[no-any-return]


class _Base:
    def __init__(self, model: Any, data: Any) -> None:  # noqa: ARG002 - given by name
        self.fields = model

    def model(self) -> nn.Module:
        return Net(self.fields)

    def train_data(self) -> Source:
        return Source(23)

    def eval_data(self) -> Source:
        return Source(17, first=1000)


class Contrastive(_Base):
    """Two views of each sample find each other in the batch; the temperature is learned."""

    def __init__(self, model: Any, data: Any) -> None:
        super().__init__({**model, "temperature": True}, data)

    def features(self, model: Any, batch: Any) -> dict[str, torch.Tensor]:
        one, two = model(batch["one"]), model(batch["two"])
        scale = model.scale.exp().expand(len(one))
        return {"one": F.normalize(one), "two": F.normalize(two), "scale": scale}

    def batch_loss(self, features: Any) -> Mean:
        logits = features["one"] @ features["two"].T * features["scale"][0]
        pairs = torch.arange(len(logits))
        both = F.cross_entropy(logits, pairs, reduction="sum") + F.cross_entropy(
            logits.T, pairs, reduction="sum"
        )
        return Mean(both / 2, len(logits))


class SupCon(_Base):
    """Samples of one class attract each other; flagged ones are anchors. A penalty on weights is
    taken from a view of them.

    arXiv:2004.11362, equation 2.
    """

    def features(self, model: Any, batch: Any) -> dict[str, torch.Tensor]:
        return {
            "z": F.normalize(model(batch["one"])),
            "weight": model.head.weight.expand(len(batch["one"]), -1, -1),
            "label": batch["label"],
            "flag": batch["flag"],
        }

    def batch_loss(self, features: Any) -> Mean:
        z, labels = features["z"], features["label"]
        assert labels.dtype == torch.int64
        assert features["flag"].dtype == torch.bool
        others = ~torch.eye(len(z), dtype=torch.bool)
        alike = (labels[:, None] == labels) & others
        logits = (z @ z.T / 0.2).masked_fill(~others, -1e9)
        log_share = logits - logits.logsumexp(1, keepdim=True)
        of_anchor = -(log_share * alike).sum(1) / alike.sum(1).clamp(min=1)
        anchors = features["flag"]
        penalty = 0.1 * features["weight"][0].square().sum() * anchors.sum()
        return Mean(of_anchor[anchors].sum() + penalty, anchors.sum())


class VICReg(_Base):
    """arXiv:2105.04906: invariance, variance and covariance over the batch. features() writes into
    its batch, and takes an array out of it.
    """

    def features(self, model: Any, batch: Any) -> dict[str, torch.Tensor]:
        return {"a": model(batch["one"].mul_(0.9)), "b": model(batch.pop("two"))}

    def batch_loss(self, features: Any) -> Mean:
        a, b = features["a"], features["b"]
        count, width = a.shape
        loss = 25 * F.mse_loss(a, b)
        for z in (a, b):
            centred = z - z.mean(0)
            spread = (centred.square().sum(0) / (count - 1) + 1e-4).sqrt()
            covariance = centred.T @ centred / (count - 1)
            off_diagonal = covariance - covariance.diag().diag()
            loss = loss + 25 * F.relu(1 - spread).mean() + off_diagonal.square().sum() / width
        return Mean(loss * count, count)


class Mixture(_Base):
    """Tokens go to one of several experts; the router is balanced over the whole batch.

    arXiv:2101.03961, equation 4.
    """

    def model(self) -> nn.Module:
        return nn.ModuleDict(
            {
                "router": nn.Linear(6, EXPERTS),
                "experts": nn.ModuleList([nn.Linear(6, 3) for _ in range(EXPERTS)]),
            }
        )

    def features(self, model: Any, batch: Any) -> dict[str, torch.Tensor]:
        x = batch["tokens"].to(model["router"].weight.dtype)
        real = torch.arange(TOKENS) < batch["length"][:, None]
        shares = model["router"](x).softmax(-1)
        chosen = F.one_hot(shares.argmax(-1), EXPERTS)
        outputs = torch.stack([expert(x) for expert in model["experts"]], -2)
        logits = (outputs * (chosen * shares)[..., None]).sum(-2)
        targets = batch["label"][:, None].expand(-1, TOKENS)
        losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        return {
            "loss": (losses * real).sum(1),
            "routed": (chosen * real[..., None]).sum(1),
            "chance": (shares * real[..., None]).sum(1),
            "tokens": real.sum(1),
        }

    def batch_loss(self, features: Any) -> Mean:
        count = features["tokens"].sum()
        routed = features["routed"].sum(0) / count
        balance = EXPERTS * (routed * features["chance"].sum(0) / count).sum()
        return Mean(features["loss"].sum() + 0.1 * balance * count, count)


class Halved(_Base):
    """features() gives one row less than there are samples in a microbatch of several."""

    def features(self, model: Any, batch: Any) -> dict[str, torch.Tensor]:
        return {"z": model(batch["one"][: max(1, len(batch["one"]) - 1)])}

    def batch_loss(self, features: Any) -> Mean:
        return Mean(features["z"].square().sum(), len(features["z"]))


class NoGradient(Halved):
    def features(self, model: Any, batch: Any) -> dict[str, torch.Tensor]:
        return {"z": model(batch["one"]).detach()}


class Unused(Halved):
    """What batch_loss() looks at follows from the first layers only."""

    def features(self, model: Any, batch: Any) -> dict[str, torch.Tensor]:
        x = batch["one"].to(model.head.weight.dtype)
        return {"z": model.layers[1](model.layers[0](x)), "unused": model(x)}


class NoMean(Halved):
    def features(self, model: Any, batch: Any) -> dict[str, torch.Tensor]:
        return {"z": model(batch["one"])}

    def batch_loss(self, features: Any) -> Mean:
        return features["z"].square().mean()  # type: ignore[no-any-return]
