"""Programs over all devices of a mesh, and the parts of their arrays on single devices.

shard_map() is jax.shard_map without empty arrays among the program's inputs. With jaxlib 0.11.2 a
process that passes an empty array to several devices, and uses it, ends by SIGSEGV. So the program
makes empty arrays itself, from their shapes.
"""

from collections.abc import Callable, Sequence
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


def joined(parts: Sequence[PyTree], specs: PyTree, mesh: Mesh) -> PyTree:
    """Make a tree of arrays over all devices, without a copy.

    parts: for each device of this process, in the mesh's order, its part of the tree
    specs: as shard_map() takes them
    """
    axis_sizes = dict(mesh.shape)

    def join(spec: PartitionSpec, *shards: jax.Array) -> jax.Array:
        cuts = [axis_sizes.get(axis, 1) for axis in spec]
        cuts += [1] * (shards[0].ndim - len(cuts))
        shape = tuple(size * cut for size, cut in zip(shards[0].shape, cuts, strict=True))
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_single_device_arrays(shape, sharding, list(shards))

    return jax.tree.map(join, _spec_of_each_leaf(specs, parts[0]), *parts, is_leaf=_is_spec)


def parts_of(tree: PyTree, devices: Sequence[jax.Device]) -> list[PyTree]:
    """Split a tree of arrays over all devices into each of these devices' part, without a copy."""
    leaves, structure = jax.tree.flatten(tree)
    by_device = [{shard.device: shard.data for shard in leaf.addressable_shards} for leaf in leaves]
    return [
        jax.tree.unflatten(structure, [shards[device] for shards in by_device])
        for device in devices
    ]


def _spec_of_each_leaf(specs: PyTree, arguments: PyTree) -> PyTree:
    def alike(spec: PartitionSpec, part: PyTree) -> PyTree:
        return jax.tree.map(lambda _: spec, part)

    return jax.tree.map(alike, specs, arguments, is_leaf=_is_spec)


def _is_spec(tree: PyTree) -> bool:
    return isinstance(tree, PartitionSpec)
