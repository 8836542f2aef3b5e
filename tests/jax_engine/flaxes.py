"""Tasks of a user's own with flax, for tests, in a file of their own as a user's are."""

import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from samecurve import Mean, rng


class Source:
    shift = 0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, ids: Any) -> dict[str, Any]:
        rows = np.stack([np.random.default_rng(int(i)).normal(size=8) for i in ids]).astype(
            np.float32
        )
        return {"x": rows, "y": (rows.sum(1) > 0).astype(np.int64) + self.shift * np.asarray(ids)}


class Layer(nnx.Module):
    def __init__(self, dtype: Any, rngs: nnx.Rngs, rate: float = 0.0) -> None:
        self.linear = nnx.Linear(8, 8, dtype=dtype, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.drop(jnp.tanh(self.linear(x)))


class Net(nnx.Module):
    def __init__(self, kind: str, dtype: Any, rngs: nnx.Rngs) -> None:
        rate = 0.3 if "drop" in kind else 0.0
        self.layers = nnx.List([Layer(dtype, rngs, rate) for _ in range(2)])
        self.turn = nnx.Param(jax.random.normal(rngs(), (8,), jnp.complex64))
        self.head = nnx.Linear(8, 2, rngs=rngs)
        self.kind = kind
        if kind == "unused":
            self.spare = nnx.Linear(8, 2, rngs=rngs)
        if kind == "batchnorm":
            self.norm = nnx.BatchNorm(8, rngs=rngs)
        if kind == "dropped stack":
            self.stack = nnx.vmap(lambda rngs: Layer(dtype, rngs, rate))(rngs.fork(split=2))
        if kind == "counts":
            self.count = nnx.Param(jnp.zeros(3, jnp.int32))
        if (
            kind == "odd"
            # a recurrent layer keeps counters of random numbers; an empty, a scalar and a short
            # parameter; constants
        ):
            self.recurrent = nnx.RNN(nnx.LSTMCell(8, 8, param_dtype=dtype, rngs=rngs))
            self.empty, self.scalar, self.short = (
                nnx.Param(jnp.zeros((0, 8))),
                nnx.Param(jnp.ones(())),
                nnx.Param(jnp.ones(3)),
            )
            self.table, self.plain = np.full(8, 0.5), jnp.ones(8)
            self.constant, self.again = (
                nnx.Variable(jnp.linspace(0, 1, 8)),
                nnx.Linear(8, 8, rngs=rngs),
            )
        if kind == "noise":
            self.rngs = rngs
        if kind == "spectral":
            self.spectral = nnx.SpectralNorm(nnx.Linear(8, 8, rngs=rngs), rngs=rngs)
        if kind == "dotted":
            self.parts = nnx.Dict(
                {"a.b": nnx.Param(jnp.ones(8)), "a": nnx.Dict({"b": nnx.Param(jnp.ones(8))})}
            )

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        if self.kind == "odd":
            x = (
                self.recurrent(x[:, None])[:, 0]
                + self.empty[...].sum(0)
                + self.scalar[...]
                * self.constant[...]
                * self.short[...].sum()
                * self.table
                * self.plain
            )
            x = nnx.remat(lambda layer, given: layer(given))(self.again, x)
        if self.kind == "dropped in a loop":
            x, _ = jax.lax.scan(lambda x, _: (self.layers[0](x), None), x, None, length=2)
        if self.kind == "noise":
            x = x + jax.random.normal(self.rngs(), x.shape)
        if self.kind == "spectral":
            x = self.spectral(x)
        return self.head(jnp.fft.ifft(jnp.fft.fft(x) * self.turn[...]).real)


class Small:
    """model.kind: what is wrong with it."""

    def __init__(self, model: Any, data: Any) -> None:
        del data
        self.kind = model.get("kind", "")

    def model(self, dtype: Any, rngs: nnx.Rngs) -> nnx.Module:
        return Net(self.kind, dtype, rngs)

    def loss(self, model: Any, batch: Any) -> Any:
        logits = jax.nn.log_softmax(
            model(batch["x"]).astype(jnp.promote_types(batch["x"].dtype, jnp.float32))
        )
        loss = -jnp.take_along_axis(logits, batch["y"][:, None], axis=1)
        if self.kind == "mean":
            return loss.mean()
        if self.kind == "raises":
            raise ZeroDivisionError("what the user's own code does")
        if self.kind == "host numbers":
            loss = loss * (1 + random.random())
        if self.kind == "counted":
            self.calls = getattr(self, "calls", 0) + 1
            loss = loss * self.calls
        return Mean(loss if self.kind == "no sum" else loss.sum(), len(batch["y"]))

    def train_data(self) -> Source:
        source = Source()
        source.shift = 3_000_000_000 if self.kind == "large" else 0
        return source

    def eval_data(self) -> Source:
        return Source()

    def metrics(self, model: Any, batch: Any) -> dict[str, Mean]:
        return {
            "accuracy": Mean((model(batch["x"]).argmax(-1) == batch["y"]).sum(), len(batch["y"]))
        }


class Noisy(Small):
    """Its loss asks for noise and a mask that follow the sample."""

    def loss(self, model: Any, batch: Any) -> Any:
        numbers = rng(batch)
        x = batch["x"] * (1 + 0.1 * numbers.normal(8)) * numbers.bernoulli(0.8, 8) / 0.8
        return super().loss(model, {**batch, "x": x})


class Plain(Small):
    """Its model can't be told what to compute in."""

    def model(self) -> nnx.Module:  # type: ignore[override]
        return Net("", None, nnx.Rngs(0))


class Whole(Small):
    """Small, which leaves rows out by itself: its loss gets a device's rows at once."""

    def leave_out(self, rows: Any, real: jax.Array) -> Any:
        return {**rows, "real": real}

    def loss(self, model: Any, batch: Any) -> Mean:
        real = batch.get("real", jnp.ones(len(batch["y"]), bool))
        logits = jax.nn.log_softmax(model(batch["x"]))
        return Mean(
            jnp.where(
                real, -jnp.take_along_axis(logits, batch["y"][:, None], axis=1)[:, 0], 0
            ).sum(),
            real.sum(),
        )

    def metrics(self, model: Any, batch: Any) -> dict[str, Mean]:
        right = model(batch["x"]).argmax(-1) == batch["y"]
        real = batch.get("real", jnp.ones(len(right), bool))
        return {"accuracy": Mean((right & real).sum(), real.sum())}


class Coupled(Whole):
    """A mean of the rows that the device has at once, or a metric's."""

    def loss(self, model: Any, batch: Any) -> Mean:
        total, weight = super().loss(model, batch)
        out = model(batch["x"]).astype(total.dtype)
        real = batch.get("real", jnp.ones(len(out), bool))
        count = real.sum() if self.kind == "idle" else jnp.maximum(real.sum(), 1)
        centre = jnp.where(real[:, None], out, 0).sum(0) / count
        return Mean(total + (centre**2).sum() * (0 if self.kind else 1), weight)

    def metrics(self, model: Any, batch: Any) -> dict[str, Mean]:
        right, weight = super().metrics(model, batch)["accuracy"]
        return {"accuracy": Mean(right, 1 if self.kind == "metric" else weight)}


class Brings(Small):
    """An optimizer of its own, which this engine has no place for."""

    def optimizer(self, params: Any) -> None: ...


class Line(nnx.Module):
    def __init__(self) -> None:
        self.slope = nnx.Param(jnp.linspace(-1.0, 1.0, 8))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.slope[...]


class Annealed:
    """A penalty that comes with the steps and goes with the epochs; logged beside the loss, as is
    what only some samples count for.
    """

    def model(self) -> Line:
        return Line()

    def loss(self, model: Any, batch: Any, step: Any, epoch: Any) -> dict[str, Mean]:
        out = model(batch["x"])
        share = jnp.minimum(1.0, step / 6) * 0.5**epoch
        error = (out - batch["y"]) ** 2 + share * out**2
        return {
            "loss": Mean(error.sum(), len(out)),
            "penalty": Mean((out**2).sum(), len(out)),
            "above": Mean(jnp.where(out > 0, out, 0).sum(), (out > 0).sum()),
        }

    def train_data(self) -> Source:
        return Source()


class Turned(Annealed):
    """Counts what it should not have counted, in all steps but the first three."""

    def loss(self, model: Any, batch: Any, step: Any, epoch: Any) -> dict[str, Mean]:
        means = super().loss(model, batch, step, epoch)
        return {**means, "loss": Mean(means["loss"].sum, means["loss"].weight * (2.5 - step))}


class Followed(Annealed):
    def after_step(self, model: Any, step: int) -> None: ...


class Phased(Annealed):
    phases = {"first": "*"}

    def loss(self, model: Any, batch: Any, phase: str) -> Any:  # type: ignore[override]  # noqa: ARG002 - by name
        return super().loss(model, batch, 0, 0)


class Scheduled(Annealed):
    def schedule(self, optimizer: Any) -> Any: ...


class Dense(linen.Module):
    """A model as flax's older interface has it."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return linen.Dense(2)(jnp.tanh(linen.Dense(8)(x)))


class Linen(Small):
    """Its model is a linen module."""

    def model(self) -> Any:  # type: ignore[override]
        return Dense()


class Bridged(Small):
    """Linen, as the refusal's remedy says."""

    def model(self, rngs: nnx.Rngs) -> Any:  # type: ignore[override]
        return nnx.bridge.ToNNX(Dense(), rngs=rngs).lazy_init(np.zeros((1, 8), np.float32))
