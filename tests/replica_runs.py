"""Tiny runs in which one rank or device gets a bit that the others do not have."""

from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

import tiny
from samecurve.errors import RunError
from samecurve.torch_engine.optimizers import local_view
from samecurve.worker.rank_main import train_rank
from tiny import Outcome, TinyRun, train_tiny

_INTEGERS = {1: torch.uint8, 4: torch.int32, 8: torch.int64}  # by bytes


@dataclass(frozen=True)
class Flip:
    """A bit of an array that is flipped on one rank or device.

    after: so many steps
    again: also after each step that follows
    """

    holder: int
    after: int
    name: str = "model/layers.0.mlp.down_proj.weight"
    again: bool = False

    def is_due(self, done: int) -> bool:
        return done == self.after or (self.again and done > self.after)


def train_flipped(index: int, group: Any, run: TinyRun, flip: Flip | None) -> Outcome | str:
    """train_tiny() with this fault. Returns the text of the RunError that it ends with."""

    def with_fault(context: Any, engine: Any, *arguments: Any) -> Any:
        if flip and context.config.engine == "jax":
            _plant_in_jax(engine, flip)
        elif flip:
            _plant(engine, index, flip)
        return train_rank(context, engine, *arguments)

    with patch.object(tiny, "train_rank", with_fault):
        try:
            return train_tiny(index, group, run)
        except RunError as error:
            return str(error)


def _plant(engine: Any, index: int, flip: Flip) -> None:
    """Flip the bit after a step of engine torch. dp: index is 0, and `holder` a device."""
    begin_steps = engine._begin_steps

    def begin(state: Any, *arguments: Any) -> None:
        begin_steps(state, *arguments)
        step = engine.step

        def stepped(state: Any, batch: Any, *others: Any) -> Any:
            result = step(state, batch, *others)
            if flip.is_due(batch.step + 1):
                models = engine._strategy.models
                if engine._setup.has_several_devices:
                    _flip(models[flip.holder].state_dict()[flip.name.removeprefix("model/")])
                elif index == flip.holder:
                    _flip(_array(engine, state, flip.name))
            return result

        engine.step = stepped

    engine._begin_steps = begin


def _array(engine: Any, state: Any, name: str) -> torch.Tensor:
    from samecurve.torch_engine.checkpoint import named_entries

    return dict(named_entries(engine._setup, state, everything=True))[name].local


def _flip(tensor: torch.Tensor) -> None:
    """Flip the lowest bit of the last number of a tensor."""
    flat = local_view(tensor.detach()).view(-1)
    flat.view(_INTEGERS[flat.element_size()])[-1] ^= 1


def _plant_in_jax(engine: Any, flip: Flip) -> None:
    """Flip the bit after a step of engine jax, on one device. exact: a state is a list of states,
    one for each device.
    """
    step = engine.step
    name = flip.name.removeprefix("model/")

    def stepped(state: Any, batch: Any, *others: Any) -> Any:
        state, metrics = step(state, batch, *others)
        if flip.is_due(batch.step + 1):
            if isinstance(state, list):
                params = state[flip.holder]["params"]
                params[name] = _flipped_jax(params[name])
            else:
                state["params"][name] = _with_flipped_copy(state["params"][name], flip.holder)
        return state, metrics

    engine.step = stepped


def _with_flipped_copy(array: Any, device: int) -> Any:
    import jax

    copies = [shard.data for shard in array.addressable_shards]
    copies[device] = _flipped_jax(copies[device])
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, copies)


def _flipped_jax(array: Any) -> Any:
    import jax
    import numpy as np

    values = np.array(array)
    values.reshape(-1).view({4: np.int32, 8: np.int64}[values.itemsize])[-1] ^= 1
    return jax.device_put(values, next(iter(array.devices())))
