"""A user task in one file of flax: `samecurve train -f examples/my_jax_task.yaml`."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from samecurve import Mean


class Points(list):
    """Points of a plane by their numbers; the label says whether one lies in the ring."""

    def __getitem__(self, ids):
        x = np.float32([np.random.default_rng(i).uniform(-1, 1, 2) for i in np.take(self, ids)])
        radius = np.hypot(x[:, 0], x[:, 1])
        return {"x": x, "inside": ((radius > 0.4) & (radius < 0.8)).astype(np.int32)}


class MyTask:
    def __init__(self, model, data):  # the config's own `model:` and `data:` fields
        self.width, self.samples = model["width"], data["samples"]

    def model(self, rngs):
        first, second = nnx.Linear(2, self.width, rngs=rngs), nnx.Linear(self.width, 2, rngs=rngs)
        return nnx.Sequential(first, nnx.gelu, second)

    def loss(self, model, batch):  # one row at a time: [1, 2] -> [1, 2]
        logs = jax.nn.log_softmax(model(batch["x"]))
        return Mean(-jnp.take_along_axis(logs, batch["inside"][:, None], 1).sum(), len(logs))

    def train_data(self):
        return Points(range(self.samples))

    def eval_data(self):
        return Points(range(self.samples, self.samples + 200))
