"""A model and data of one's own, in one file of flax: does a point lie in the ring?

samecurve train -f examples/my_jax_task.yaml
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from samecurve import Mean


class Points:
    def __init__(self, first, count):
        self.first, self.count = first, count

    def __len__(self):
        return self.count

    def __getitem__(self, ids):
        x = np.stack([np.random.default_rng(self.first + i).uniform(-1, 1, 2) for i in ids]).astype(
            np.float32
        )  # a sample follows from its number
        radius = np.hypot(*x.T)
        return {"x": x, "inside": ((radius > 0.4) & (radius < 0.8)).astype(np.int32)}


class MyTask:
    def __init__(self, model, data):  # the config's own `model:` and `data:` fields
        self.width, self.samples = model["width"], data["samples"]

    def model(self, rngs):
        return nnx.Sequential(
            nnx.Linear(2, self.width, rngs=rngs),
            nnx.gelu,
            nnx.Linear(self.width, self.width, rngs=rngs),
            nnx.gelu,
            nnx.Linear(self.width, 2, rngs=rngs),
        )

    def loss(self, model, batch):  # one row at a time: [1, 2] -> [1, 2]
        logs = jax.nn.log_softmax(model(batch["x"]))
        return Mean(-jnp.take_along_axis(logs, batch["inside"][:, None], 1).sum(), len(logs))

    def train_data(self):
        return Points(0, self.samples)

    def eval_data(self):
        return Points(self.samples, 200)
