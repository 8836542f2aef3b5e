"""Frozen weights of blocks in host memory (devices.offload_frozen), copied to the device for each
call of their block.

Between calls a block's frozen parameters lie in host memory, pinned where the device is a GPU:
digests, checkpoints and the replicas of other devices read them there. During a call they lie in a
buffer of the device, which the blocks share (block_buffers.py); what autograd keeps of them for the
backward pass is their place (saved_weights.py). The same kernels compute on the same numbers, so
no bit of a result changes.

A CPU device takes the same way, with copies from one part of host memory to another.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from samecurve.features.offload_frozen.block_buffers import BlockBuffers, Buffer
from samecurve.features.offload_frozen.host_blocks import offloaded_blocks
from samecurve.features.offload_frozen.saved_weights import SavedWeights
from samecurve.torch_engine.model.frozen_blocks import FrozenBlock, frozen_blocks
from samecurve.torch_engine.strategies import Materialize, Strategy

# bytes at whose multiples arrays begin, as torch's allocators do it: kernels may add numbers that
# begin elsewhere in another order
_ALIGNED = 512


@dataclass(frozen=True)
class _Array:
    """Where a parameter lies in the memory of its block."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # bytes

    def within(self, block: torch.Tensor) -> torch.Tensor:
        """The parameter's values. block: the bytes of the whole block, uint8"""
        first = (block.storage_offset() + self.offset) // self.dtype.itemsize
        return block.view(self.dtype).as_strided(self.shape, self.stride, first)


class _OffloadedBlock:
    """A block of one model, whose frozen parameters lie in host memory."""

    def __init__(self, number: int, block: FrozenBlock) -> None:
        """number: among the offloaded blocks"""
        self.number, self._block = number, block
        self.values = torch.empty(0, dtype=torch.uint8)  # the block's bytes in host memory
        self.arrays: list[_Array] = []
        self._parameters = block.parameters
        self._at_rest: list[torch.Tensor] = []
        # by buffer, the parameters' values in it
        self._in_buffer: dict[int, list[torch.Tensor]] = {}
        self._orders: list[tuple[nn.Module, list[str]]] = []  # names of modules' parameters
        self._buffers: BlockBuffers | None = None
        self._saved: SavedWeights | None = None
        block.module.forward = self._with_weights(block.module.forward)

    def lay_out(self) -> int:
        """Choose where each parameter lies, once they have values. Returns the block's bytes."""
        size = 0
        for parameter in self._block.parameters:
            data = parameter.detach()
            dense = data if data.is_contiguous() else torch.empty_like(data)
            self.arrays.append(_Array(data.dtype, tuple(data.shape), dense.stride(), size))
            size += -(-data.nbytes // _ALIGNED) * _ALIGNED
        return size

    def move_to(self, values: torch.Tensor) -> None:
        """Move the parameters' values to this part of host memory."""
        self.values = values
        for array, parameter in zip(self.arrays, self._block.parameters, strict=True):
            place = array.within(values)
            place.copy_(parameter.detach())
            parameter.data = place

    def share(self, other: "_OffloadedBlock") -> None:
        """Have the same values, in the same memory, as a block of another model."""
        self.values, self.arrays = other.values, other.arrays

    def set_aside(self) -> None:
        """Take the parameters out of their modules, so that nobody moves them to a device."""
        self._parameters = self._block.parameters
        modules = dict.fromkeys(module for module, _ in self._block.places)
        # public nowhere else
        self._orders = [(module, list(module._parameters)) for module in modules]  # noqa: SLF001
        for module, name in self._block.places:
            delattr(module, name)

    def put_back(self, buffers: BlockBuffers) -> None:
        """Put the parameters into their modules again, with their values in host memory."""
        self._at_rest = [array.within(self.values) for array in self.arrays]
        for number, values in enumerate(self._at_rest):
            module, name = self._block.places[number]
            parameter = self._parameters[number]
            if parameter.is_meta:  # of a replica, which has got no values
                parameter = self._parameters[number] = nn.Parameter(values, requires_grad=False)
            parameter.data = values
            setattr(module, name, parameter)
        for module, names in self._orders:
            own = dict(module._parameters)  # noqa: SLF001 - as above
            module._parameters.clear()  # noqa: SLF001 - as above
            module._parameters.update({name: own[name] for name in names})  # noqa: SLF001 - as above
        self._in_buffer = {
            id(buffer): [array.within(buffer.bytes) for array in self.arrays]
            for buffer in buffers.all
        }
        self._buffers, self._saved = buffers, SavedWeights(buffers, self.number)

    def _with_weights(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The block's forward pass, with its weights on the device meanwhile."""

        @wraps(forward)
        def with_weights(*arguments: Any, **named: Any) -> Any:
            if self._buffers is None or self._saved is None:  # not laid out: without values
                return forward(*arguments, **named)
            buffer = self._buffers.need(self.number)
            hooks = self._saved.hooks(buffer) if torch.is_grad_enabled() else nullcontext()
            with self._lying_in(buffer), hooks:
                output = forward(*arguments, **named)
            return _outside_of(buffer, output)

        return with_weights

    @contextmanager
    def _lying_in(self, buffer: Buffer) -> Iterator[None]:
        """Let the parameters lie in a buffer for the time of a call.

        RuntimeError: the call changes one of them.
        """
        pairs = list(zip(self._parameters, self._in_buffer[id(buffer)], strict=True))
        versions = [parameter._version for parameter in self._parameters]  # noqa: SLF001 - counts changes; public nowhere
        buffer.calls += 1
        for parameter, values in pairs:
            parameter.data = values
        try:
            yield
        finally:
            buffer.calls -= 1
            for parameter, values in zip(self._parameters, self._at_rest, strict=True):
                parameter.data = values
        if versions != [parameter._version for parameter in self._parameters]:  # noqa: SLF001 - as above
            raise RuntimeError(
                "devices.offload_frozen: a forward pass changes frozen weights of its block, which"
                " are a copy then; leave devices.offload_frozen out"
            )


def _outside_of(buffer: Buffer, output: Any) -> Any:
    """What a block returned, with copies in place of its weights that lie in a buffer."""
    tensors = (leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))
    if all(buffer.offset_of(tensor) is None for tensor in tensors):
        return output

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if buffer.offset_of(tensor) is None else tensor.clone()

    return tree_map_only(torch.Tensor, own, output)


class FrozenOffload:
    """The offloaded blocks of a process's models, one model for each device."""

    def __init__(self, share: float) -> None:
        """share: of the blocks that have frozen weights (devices.offload_frozen)"""
        self._share = share
        self._of_models: list[list[_OffloadedBlock]] = []
        self.names: frozenset[str] = frozenset()  # of the parameters in host memory
        self.buffers: list[BlockBuffers] = []  # by device of this process

    def add(self, model: nn.Module) -> None:
        """Take in a model that has no place yet, before anything else wraps its blocks."""
        blocks = frozen_blocks(model)
        chosen = [blocks[number] for number in offloaded_blocks(len(blocks), self._share)]
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.names = frozenset(names[id(one)] for block in chosen for one in block.parameters)
        self._of_models.append(
            [_OffloadedBlock(number, block) for number, block in enumerate(chosen)]
        )

    def set_aside(self, materialize: Materialize, *, pinned: bool) -> Materialize:
        """Before a strategy lays the models out, all but what lies in host memory.

        materialize: leaves the parameters `names` of the first model in host memory. Replicas on
            other devices of this process share the first one's memory.
        pinned: a GPU can copy from it by itself
        """
        first, *others = self._of_models

        def materialize_and_keep(part: nn.Module) -> None:
            materialize(part)
            _move_to_host(first, pinned=pinned)

        for blocks in others:
            for block in blocks:
                block.set_aside()
        return materialize_and_keep

    def put_back(self, strategy: Strategy, devices: Sequence[torch.device]) -> None:
        """Once the models are laid out, one on each of these devices."""
        (first, *others), self._of_models = self._of_models, []
        for blocks in others:
            for block, same in zip(blocks, first, strict=True):
                block.share(same)
        for blocks, device in zip([first, *others], devices, strict=True):
            buffers = BlockBuffers([block.values for block in blocks], device)
            self.buffers.append(buffers)
            strategy.caches.append(buffers.forget)
            for block in blocks:
                block.put_back(buffers)


def _move_to_host(blocks: Sequence[_OffloadedBlock], *, pinned: bool) -> None:
    """Move the blocks' parameters to pieces of host memory, and set them aside.

    pinned: a GPU can copy from it by itself
    """
    sizes = [block.lay_out() for block in blocks]
    piece, used, rest = torch.empty(0, dtype=torch.uint8), 0, sum(sizes)
    for block, size in zip(blocks, sizes, strict=True):
        if used + size > len(piece):
            length = piece_length(rest, size)
            piece, used = torch.empty(length, dtype=torch.uint8, pin_memory=pinned), 0
        block.move_to(piece[used : used + size])
        block.set_aside()
        used, rest = used + size, rest - size


def piece_length(rest: int, size: int) -> int:
    """The bytes of the next piece of host memory: a power of two, to which torch rounds pinned
    memory up. It has room for one block at least.

    rest: bytes of all blocks that are still to be moved
    size: bytes of the next block
    """
    at_most = 1 << (rest.bit_length() - 1)
    return at_most if at_most >= size else 1 << (size - 1).bit_length()
