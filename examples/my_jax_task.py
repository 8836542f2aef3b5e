"""A user task in one file of flax: `samecurve train -f examples/my_jax_task.yaml`."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from samecurve import Mean


class MyTask:
    def __init__(self, model, data):  # the config's own `model:` and `data:` fields
        self.width, self.samples = model["width"], data["samples"]

    def model(self, rngs):
        first, second = nnx.Linear(2, self.width, rngs=rngs), nnx.Linear(self.width, 2, rngs=rngs)
        return nnx.Sequential(first, nnx.gelu, second)

    def loss(self, model, batch):  # one row at a time: [1, 2] -> [1, 2]
        log_probs = jax.nn.log_softmax(model(batch["x"]))
        picked = jnp.take_along_axis(log_probs, batch["inside"][:, None], axis=1)
        return Mean(-picked.sum(), len(log_probs))

    def train_data(self):
        return Points(0, self.samples)

    def eval_data(self):
        return Points(self.samples, 200)


class Points:  # of a plane; the label says whether one lies in the ring
    def __init__(self, first, count):
        self.first, self.count = first, count

    def __len__(self):
        return self.count

    def __getitem__(self, ids):  # the same id gives the same row, whenever it is read
        x = np.float32([np.random.default_rng(self.first + i).uniform(-1, 1, 2) for i in ids])
        return {"x": x, "inside": (np.abs(np.hypot(*x.T) - 0.6) < 0.2).astype(np.int32)}
