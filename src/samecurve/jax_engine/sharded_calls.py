"""jax.shard_map without empty arrays among the program's inputs.

With jaxlib 0.11.2 a process that passes an empty array to several devices, and uses it, ends by
SIGSEGV. So the program makes empty arrays itself, from their shapes.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from samecurve.jax_engine.array_types import PyTree


def shard_map(
    function: Callable[..., Any], *, mesh: Mesh | AbstractMesh, in_specs: PyTree, out_specs: PyTree
) -> Callable[..., Any]:
    """Call a function on all devices of the mesh, each with its part of the arguments.

    in_specs, out_specs: trees of PartitionSpec; one spec may stand for a whole subtree.
    """

    def call(*arguments: PyTree) -> PyTree:
        leaves: list[jax.Array]
        tree: Any
        leaves, tree = jax.tree.flatten(arguments)
        specs = jax.tree.leaves(_spec_of_each_leaf(in_specs, arguments), is_leaf=_is_spec)
        filled = [place for place, leaf in enumerate(leaves) if leaf.size]

        def with_empty(*values: jax.Array) -> PyTree:
            by_place = dict(zip(filled, values, strict=True))
            parts = []
            for place, (leaf, spec) in enumerate(zip(leaves, specs, strict=True)):
                if place not in by_place:
                    shape = NamedSharding(mesh, spec).shard_shape(leaf.shape)
                    by_place[place] = jnp.zeros(shape, leaf.dtype)
                parts.append(by_place[place])
            return function(*tree.unflatten(parts))

        mapped = jax.shard_map(
            with_empty,
            mesh=mesh,
            in_specs=tuple(specs[place] for place in filled),
            out_specs=out_specs,
            check_vma=False,
        )
        return mapped(*(leaves[place] for place in filled))

    return call


def over_devices(function: Callable[..., Any], mesh: Mesh | AbstractMesh) -> Callable[..., Any]:
    """Call a function with each device's rows; it returns the same on every device."""
    return shard_map(
        function, mesh=mesh, in_specs=PartitionSpec(*mesh.axis_names), out_specs=PartitionSpec()
    )


def _spec_of_each_leaf(specs: PyTree, arguments: PyTree) -> PyTree:
    def alike(spec: PartitionSpec, part: PyTree) -> PyTree:
        return jax.tree.map(lambda _: spec, part)

    return jax.tree.map(alike, specs, arguments, is_leaf=_is_spec)


def _is_spec(tree: PyTree) -> bool:
    return isinstance(tree, PartitionSpec)
