"""nnx.Dropout with masks that follow the sample: the numbers of torch's dropout layers.

A mask is a pure function of (row key, seed, module name, call, element);
torch_engine/randomness/dropout_layers.py has the rule and keyed_numbers.py the lanes. A layer of
the same name drops the same elements under either engine.
"""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from samecurve.core.sample_numbers import current_numbers
from samecurve.errors import UserError
from samecurve.jax_engine.array_types import Shape
from samecurve.jax_engine.sample_numbers import JaxSampleNumbers

_LANES = 65536
_MARK = "samecurve dropout: "  # before the name of a mask in a traced program
_LOOPS = {"scan", "while"}  # jax's primitives whose body runs several times


def dropout_names(model: nnx.Module) -> tuple[str, ...]:
    """Names of the layers that drop something in training."""
    return tuple(name for name, _ in _dropouts(model))


def key_dropout(model: nnx.Module, seed: int) -> None:
    """Let each nnx.Dropout of a model draw its masks from the keys of the rows in work.

    Their own generators are dropped.

    UserError: a layer stands for several (nnx.vmap, nnx.scan), or all samples share its mask.
    """
    for name, module in _dropouts(model):
        _refuse_unlike(name, module)
        kind: Any = type(module)
        module.__class__ = _keyed(kind)
        module.rngs = nnx.data(None)
        module.samecurve_name, module.samecurve_seed = name, seed


def _dropouts(model: nnx.Module) -> list[tuple[str, Any]]:
    return [
        (".".join(map(str, path)), module)
        for path, module in nnx.iter_modules(model)
        if isinstance(module, nnx.Dropout) and module.rate > 0 and not module.deterministic
    ]


def _refuse_unlike(name: str, module: nnx.Dropout) -> None:
    keys = jax.tree.leaves(nnx.state(module, nnx.RngKey))
    if any(key.shape for key in keys):
        raise UserError(
            f"Dropout {name} stands for the layers of a stack (nnx.vmap or nnx.scan), which would"
            " all drop the same elements",
            "an nnx.List of the layers, each with a Dropout of its own",
            "task",
        )
    if 0 in module.broadcast_dims:
        raise UserError(
            f"Dropout {name} has broadcast_dims 0: all samples of a device would share one mask",
            "broadcast_dims without 0, so that each sample has a mask of its own",
            "task",
        )


class KeyedDropout(nnx.Dropout):
    """A Dropout whose masks follow the sample, whatever generator it is given."""

    samecurve_name: str
    samecurve_seed: int

    def __call__(
        self, inputs: jax.Array, *, deterministic: bool | None = None, rngs: Any = None
    ) -> jax.Array:
        del rngs
        if self.deterministic if deterministic is None else deterministic:
            return inputs
        if self.rate == 1:
            return jnp.zeros_like(inputs)
        dropped = min(max(round(_LANES * self.rate), 1), _LANES - 1)
        kept = checkpoint_name(self._lanes(inputs.shape) >= dropped - _LANES // 2, self._mark)
        scale = _LANES / (_LANES - dropped)
        wide = jnp.promote_types(inputs.dtype, jnp.float32)  # rounds once, as torch does
        factor = jnp.where(kept, scale, 0.0).astype(wide)
        return (inputs.astype(wide) * factor).astype(inputs.dtype)

    @property
    def _mark(self) -> str:
        return f"{_MARK}{self.samecurve_name}"

    def _lanes(self, shape: Shape) -> jax.Array:
        """int16, uniform, in the shape of the inputs but for the dimensions that share a mask."""
        numbers = current_numbers()
        if not isinstance(numbers, JaxSampleNumbers):
            raise UserError(
                f"Dropout {self.samecurve_name} is called, and no microbatch is in work",
                "call the model in loss() or metrics(), or after model.eval()",
                "task",
            )
        shared = {dim % len(shape) for dim in self.broadcast_dims}
        sizes = tuple(1 if dim in shared else size for dim, size in enumerate(shape))
        rows = numbers.rows
        if not sizes or sizes[0] % rows:
            raise UserError(
                f"Dropout {self.samecurve_name} is given {list(shape)} for {rows} samples, so its"
                " mask can't follow the samples",
                "samples first, each with equally many neighbouring rows; or leave it out: rate 0",
                "task",
            )
        row = (sizes[0] // rows, *sizes[1:])
        lanes = numbers.lanes(self.samecurve_seed, self.samecurve_name, row)
        return lanes.reshape(sizes)


@cache
def _keyed(kind: Any) -> Any:
    """A subclass of a layer's class, so that isinstance() gives what it gave before."""
    if issubclass(kind, KeyedDropout):
        return kind
    return type(f"Keyed{kind.__name__}", (KeyedDropout, kind), {"__module__": __name__})


def refuse_repeated_masks(jaxpr: Any) -> None:
    """UserError: a mask is drawn in a loop of the program, each turn of which would repeat it."""
    name = _looped_mask(jaxpr, in_loop=False)
    if name is not None:
        raise UserError(
            f"Dropout {name} is called in a loop that jax compiles (lax.scan, nnx.scan, RNN): each"
            " turn would drop the same elements",
            "drop before or after the loop, or unroll it: an nnx.List of layers and a for loop",
            "task",
        )


def _looped_mask(jaxpr: Any, *, in_loop: bool) -> str | None:
    for equation in jaxpr.eqns:
        kind = equation.primitive.name
        name = str(equation.params.get("name", ""))
        if in_loop and kind == "name" and name.startswith(_MARK):
            return name.removeprefix(_MARK)
        for inner in jax.core.jaxprs_in_params(equation.params):
            looped = _looped_mask(inner, in_loop=in_loop or kind in _LOOPS)
            if looped is not None:
                return looped
    return None
