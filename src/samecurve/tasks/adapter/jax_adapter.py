"""A task's class with jax: a flax.nnx module, and a loss of one row at a time."""

import inspect
import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from samecurve.core.determinism import RETURN_MEAN, Mean
from samecurve.core.protocols import Arrays, StoredArrays
from samecurve.core.weights import check_weights
from samecurve.errors import UserError
from samecurve.jax_engine.attention import attention_head
from samecurve.jax_engine.complex_pairs import is_complex
from samecurve.jax_engine.dropout import dropout_names
from samecurve.jax_engine.model import (
    abstract_model,
    blocks,
    named_values,
    open_model,
    param_shapes,
)
from samecurve.jax_engine.sample_numbers import with_numbers, with_trial_keys
from samecurve.tasks.adapter import TaskAdapter
from samecurve.tasks.adapter.opened_class import NEEDED
from samecurve.tasks.adapter.returned import FEATURES, spec_of

_COMPUTE = {"f64": jnp.float64, "f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}
_KEPT = (nnx.Intermediate, nnx.Cache)  # what a forward pass may leave behind


class JaxAdapter(TaskAdapter):
    engine = "jax"
    needed: ClassVar[Mapping[str, str]] = {
        **NEEDED,
        "model": (
            "model(self) -> flax.nnx.Module: the model, built anew; model(self, dtype) where its"
            " layers can compute in bf16 or f16"
        ),
    }

    @property
    def leave_out(self) -> Callable[[Arrays, jax.Array], Arrays] | None:
        """The class's own way to leave rows out of a whole microbatch; None: row by row."""
        leave_out: Callable[[Arrays, jax.Array], Arrays] | None = self.methods.leave_out
        return leave_out

    def describe_model(self) -> Mapping[str, Any]:
        with jax.enable_x64(self.config.train.precision == "f64"):
            model = abstract_model(self.model)
        self._refuse(model)
        self._check_engine_serves_class()
        sizes = {
            ".".join(map(str, path)): sum(map(_scalars, jax.tree.leaves(leaf)))
            for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))
        }
        params = sum(sizes.values())
        if not params:
            remedy = "nnx.Params, in the module or its children"
            raise self.wrong("model", "has no parameter to train", remedy)
        parts = [
            sum(map(_scalars, jax.tree.leaves(nnx.state(block, nnx.Param))))
            for block in blocks(model) or [model]
        ]
        return {
            **self.config.optimizer.rules.describe(sizes),
            "params": params,
            "blocks": len(parts),
            "block_params": max(parts),
            "arrays": param_shapes(model),
            "coupled": tuple(self.methods.coupled),
            "attention_head": attention_head(model),
            "keyed_dropout": dropout_names(model),
        }

    def _check_engine_serves_class(self) -> None:
        """UserError: the class has a member that this engine can't honour."""
        methods = self.methods
        refused = {
            "optimizer()": methods.optimizer and "trains with the config's adamw and sgd only",
            "phases": self.phases and "has one loss and one optimizer a step",
            "frozen_base": self.frozen_base and "saves all of a model",
            "model_blocks()": methods.model_blocks and "takes the elements of nnx.Lists as blocks",
            "after_step()": methods.after_step and "changes weights by its own update only",
        }
        for member, instead in refused.items():
            if instead:
                remedy = "--engine torch with a torch model"
                if member != "phases":
                    remedy = f"leave it out of the class, or {remedy}"
                raise UserError(
                    f"{self.name}.{member}: engine jax {instead}, in this version", remedy, "task"
                )

    def model(self) -> nnx.Module:
        """The class's model, its generators begun at the run's seed."""
        build = self.methods.model
        takes = inspect.signature(build).parameters
        if self.config.train.precision in {"bf16", "f16"} and "dtype" not in takes:
            raise self.wrong(
                "model",
                f"can't be told to compute in {self.config.train.precision}",
                "def model(self, dtype): and dtype=dtype for its layers, whose parameters stay in"
                " float32; or --dtype f32",
            )
        random.seed(self.config.train.seed)
        np.random.seed(self.config.train.seed % 2**32)
        arguments = {
            "dtype": _COMPUTE[self.config.train.precision],
            "rngs": nnx.Rngs(self.config.train.seed),
        }
        arguments = {name: value for name, value in arguments.items() if name in takes}
        with self.calling("model"):
            model = build(**arguments)
        if isinstance(model, nnx.Module):
            return model
        remedy = self.needed["model"]
        if any(kind.__module__.startswith("torch.") for kind in type(model).__mro__):
            remedy = "--engine torch, which trains torch modules"
        cause = f"returns {type(model).__name__}, not a flax.nnx.Module"
        if any(kind.__module__.startswith("flax.linen") for kind in type(model).__mro__):
            cause = f"returns {type(model).__name__} of flax.linen, not a flax.nnx.Module"
            remedy = (
                "wrap it (from flax import nnx): def model(self, rngs): return nnx.bridge.ToNNX("
                f"{type(model).__name__}(...), rngs=rngs).lazy_init(rows), where rows is an array"
                " like those that loss() passes to the model; or write it with flax.nnx"
            )
        raise self.wrong("model", cause, remedy)

    def check_loss(self, loss: object, what: str) -> None:
        if not isinstance(loss, Mean):
            cause = f"{what} returns {type(loss).__name__}, not a samecurve.Mean"
            raise UserError(cause, RETURN_MEAN, "task")
        total, weight = jnp.asarray(loss.sum), jnp.asarray(loss.weight)
        if total.ndim or not jnp.issubdtype(total.dtype, jnp.floating):
            kind = f"{total.dtype} of shape {total.shape}"
            raise UserError(
                f"the sum of {what} is {kind}, not one real number", RETURN_MEAN, "task"
            )
        if weight.ndim:
            cause = f"the weight of {what} has shape {weight.shape}, not one number"
            raise UserError(cause, RETURN_MEAN, "task")

    def check_features(self, features: object) -> None:
        if not isinstance(features, Mapping) or not features:
            raise self.wrong("features", f"returns {type(features).__name__}", FEATURES)
        for name, feature in features.items():
            if not jnp.ndim(feature):
                raise self.wrong("features", f'gives "{name}" as one number', FEATURES)

    def metric_specs(self, row: Mapping[str, NDArray[Any]]) -> dict[str, Mean]:
        specs: dict[str, Mean] = {}

        def look(row: Mapping[str, Any]) -> None:
            model = self.model()
            model.eval()
            metrics = self.measure(model, row)
            specs.update({name: spec_of(mean) for name, mean in metrics.items()})

        count = len(next(iter(row.values())))
        jax.eval_shape(partial(with_numbers, look), with_trial_keys(row, count))
        return specs

    def load(self, weights: StoredArrays) -> nnx.Module:
        """The model with these weights, by a checkpoint's names, in eval mode."""
        train = self.config.train
        with jax.enable_x64(train.precision == "f64"):
            opened, initial = open_model(self, train.precision, train.seed)
            check_weights(
                {name: weights.shape(name) for name in weights},
                {name: spec.shape for name, spec in opened.specs.items()},
                (),
                "the checkpoint",
                "task",
            )
            values = {
                name: jnp.asarray(weights[name] if np.prod(spec.shape) else initial(name))
                for name, spec in opened.specs.items()
            }
            model: nnx.Module = opened.merge_for_eval(values)
        return model

    def place(self, model: nnx.Module, device: str) -> nnx.Module:
        graph, state = nnx.split(model)
        index = int(device.partition(":")[2] or 0)
        target = jax.devices("cpu" if device == "cpu" else "gpu")[index]
        placed: nnx.Module = nnx.merge(graph, jax.device_put(state, target))
        return placed

    def named_tensors(self, model: nnx.Module) -> dict[str, Any]:
        import torch  # only to be written: safetensors' formats are wider there than in numpy

        return {
            name: torch.from_numpy(np.array(value)) for name, value in named_values(model).items()
        }

    def _refuse(self, model: nnx.Module) -> None:
        """UserError: the model has a part that this engine can't train as it is meant."""
        for path, module in nnx.iter_modules(model):
            where = ".".join(map(str, path))
            if isinstance(module, nnx.BatchNorm):
                raise UserError(
                    f"BatchNorm {where} mixes the samples of a batch: not with engine jax in this"
                    " version",
                    "nnx.GroupNorm or nnx.LayerNorm, which treat each sample by itself; or --engine"
                    " torch with train.norm_sync",
                    "task",
                )
        moving = [kind for kind in _KEPT if jax.tree.leaves(nnx.state(model, kind))]
        if moving:
            raise UserError(
                f"the model keeps {moving[0].__name__} variables, which a step can't carry on",
                "nnx.Param for what is trained; pass on what else changes as values",
                "task",
            )


def _scalars(leaf: Any) -> int:
    return int(np.prod(leaf.shape)) * (2 if is_complex(leaf) else 1)
