"""Tasks of a user's own with flax, for tests, in a file of their own as a user's are."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lockstep import Mean


class Source:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, ids: Any) -> dict[str, Any]:
        rows = np.stack([np.random.default_rng(int(i)).normal(size=8) for i in ids]).astype(np.float32)
        return {"x": rows, "y": (rows.sum(1) > 0).astype(np.int64)}


class Layer(nnx.Module):
    def __init__(self, dtype: Any, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(8, 8, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(self.linear(x))


class Net(nnx.Module):
    def __init__(self, kind: str, dtype: Any, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([Layer(dtype, rngs) for _ in range(2)])
        self.turn = nnx.Param(jax.random.normal(rngs(), (8,), jnp.complex64))
        self.head = nnx.Linear(8, 2, rngs=rngs)
        self.kind = kind
        if kind == "unused":
            self.spare = nnx.Linear(8, 2, rngs=rngs)
        if kind == "batchnorm":
            self.norm = nnx.BatchNorm(8, rngs=rngs)
        if kind == "dropout":
            self.drop = nnx.Dropout(0.5, rngs=rngs)
        if kind == "counts":
            self.count = nnx.Param(jnp.zeros(3, jnp.int32))

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return self.head(jnp.fft.ifft(jnp.fft.fft(x) * self.turn[...]).real)


class Small:
    """model.kind: what is wrong with it."""

    def __init__(self, model: Any, data: Any) -> None:
        self.kind = model.get("kind", "")

    def model(self, dtype: Any, rngs: nnx.Rngs) -> nnx.Module:
        return Net(self.kind, dtype, rngs)

    def loss(self, model: Any, batch: Any) -> Any:
        logits = jax.nn.log_softmax(model(batch["x"]).astype(jnp.promote_types(batch["x"].dtype, jnp.float32)))
        loss = -jnp.take_along_axis(logits, batch["y"][:, None], axis=1)
        if self.kind == "mean":
            return loss.mean()
        return Mean(loss if self.kind == "no sum" else loss.sum(), len(batch["y"]))

    def train_data(self) -> Source:
        return Source()

    def eval_data(self) -> Source:
        return Source()

    def metrics(self, model: Any, batch: Any) -> dict[str, Mean]:
        return {"accuracy": Mean((model(batch["x"]).argmax(-1) == batch["y"]).sum(), len(batch["y"]))}


class Plain(Small):
    """Its model can't be told what to compute in."""

    def model(self) -> nnx.Module:  # type: ignore[override]
        return Net("", None, nnx.Rngs(0))
