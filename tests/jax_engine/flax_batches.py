"""Flax tasks whose loss is one of the whole batch, in a file of their own as a user's are; and
their plain loop.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from samecurve import Mean


class Source:
    def __init__(self, count: int, first: int = 0) -> None:
        self.count, self.first = count, first

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, ids: Any) -> dict[str, Any]:
        rows = np.stack([np.random.default_rng(int(i) + self.first).normal(size=12) for i in ids])
        one, other = rows[:, :6], rows[:, 6:]
        return {"one": one, "two": one + 0.3 * other, "label": np.asarray(ids) % 3}


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inner, self.head = nnx.Linear(6, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)
        self.scale = nnx.Param(jnp.full((), 0.7))

    def __call__(self, x: jax.Array) -> jax.Array:
        z = self.head(jnp.tanh(self.inner(x)))
        return jnp.asarray(z / jnp.linalg.norm(z, axis=-1, keepdims=True))


class Contrastive:
    """Views find each other, those of one class count half; the temperature is learned."""

    def __init__(self, model: Any, data: Any) -> None:
        del model, data

    def model(self, rngs: nnx.Rngs) -> Net:
        return Net(rngs)

    def train_data(self) -> Source:
        return Source(23)

    def eval_data(self) -> Source:
        return Source(17, first=1000)

    def features(self, model: Any, batch: Any) -> dict[str, jax.Array]:
        scale = jnp.broadcast_to(jnp.exp(model.scale[...]), len(batch["one"]))
        one, two = model(batch["one"]), model(batch["two"])
        return {"one": one, "two": two, "scale": scale, "label": batch["label"]}

    def batch_loss(self, features: Any) -> Mean:
        logits = features["one"] @ features["two"].T * features["scale"].mean()
        alike = (features["label"][:, None] == features["label"]).astype(logits.dtype)
        wanted = jnp.eye(len(logits)) + alike
        wanted = wanted / wanted.sum(1, keepdims=True)
        return Mean(-(wanted * jax.nn.log_softmax(logits)).sum(), len(logits))


def plain_loop(_index: int, _group: Any, values: Any) -> tuple[list[float], list[float], Any]:
    """Losses, held-out losses and weights of the whole batch at once, under SGD with momentum."""
    import jobs

    engine, plan, state, _ = jobs.opened(values)
    task = engine.task
    model = engine._model
    params = {
        name: jnp.asarray(array.addressable_data(0)) for name, array in state["params"].items()
    }
    moments = jax.tree.map(jnp.zeros_like, params)

    @jax.jit
    def loss(params: Any, rows: Any) -> Any:
        mean = task.task.batch_loss(task.task.features(model.merge(params), rows))
        return mean.sum / mean.weight

    losses, held_out, evaluated = [], task.eval_data(), []
    for step in range(plan.steps):
        rows = task.train_data()[plan.order.ids(range(step, step + 1))[0]]
        value, gradients = jax.value_and_grad(loss)(params, rows)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradients)
        moves = jax.tree.map(partial(jnp.multiply, plan.lr_at(step)), moments)
        params = jax.tree.map(jnp.subtract, params, moves)
        losses.append(float(value))
        if (step + 1) % 3 == 0:
            first, last = (loss(params, held_out[np.arange(*ends)]) for ends in ((0, 10), (10, 17)))
            evaluated.append(float(10 * first + 7 * last) / 17)
    return losses, evaluated, {f"model/{name}": np.asarray(a) for name, a in params.items()}
