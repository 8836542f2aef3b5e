"""What autograd keeps of a block whose weights lie in a buffer for a while: not the tensor, but the
place that it has in its block.

When the backward pass asks for the tensor, the block is copied into a buffer again. So a tensor
that was kept is right whenever it is asked for, in any order.
"""

from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from samecurve.features.offload_frozen.block_buffers import BlockBuffers, Buffer
from samecurve.torch_engine.model.saved_weights import unchanged, with_version


class _Place(NamedTuple):
    """A tensor that lies in a block, by where it lies there."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # bytes from the block's beginning

    def within(self, buffer: Buffer) -> torch.Tensor:
        first = self.offset // self.dtype.itemsize
        return buffer.bytes.view(self.dtype).as_strided(self.size, self.stride, first)


class SavedWeights:
    """Keeps the tensors of one block that autograd saves while the block is called.

    Other tensors are kept as they would be without this: by the hooks that hold around the call
    (torch.utils.checkpoint has such), or else as they are.
    """

    def __init__(self, buffers: BlockBuffers, block: int) -> None:
        self._buffers, self._block = buffers, block

    def hooks(self, buffer: Buffer) -> saved_tensors_hooks:
        """The hooks for one call. buffer: holds the block meanwhile"""
        # hooks don't nest: only the innermost pair is called
        around: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)  # noqa: SLF001 - public nowhere
        keep, give_back = around or (with_version, unchanged)

        def pack(tensor: torch.Tensor) -> Any:
            offset = buffer.offset_of(tensor)
            if offset is None:
                return keep(tensor)
            if tensor.is_conj() or tensor.is_neg():
                return _Copy(tensor.clone())
            return _Place(tensor.dtype, tuple(tensor.size()), tensor.stride(), offset)

        def unpack(kept: Any) -> torch.Tensor:
            if type(kept) is _Place:
                return self._again(kept, is_copied=around is not None)
            if type(kept) is _Copy:
                return kept.tensor
            tensor: torch.Tensor = give_back(kept)
            return tensor

        return saved_tensors_hooks(pack, unpack)

    def _again(self, kept: _Place, *, is_copied: bool) -> torch.Tensor:
        """The tensor, in a buffer.

        A copy is given where the buffer may be taken by another block before the tensor was used:
        under hooks of a checkpoint, whose next tensor may run several blocks again; and in a
        backward pass that is itself recorded, which keeps the tensor.
        """
        tensor = kept.within(self._buffers.need(self._block))
        return tensor.clone() if is_copied or torch.is_grad_enabled() else tensor


class _Copy(NamedTuple):
    tensor: torch.Tensor
