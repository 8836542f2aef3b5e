"""The work of a forward pass: its FLOP and its operations, counted as torch calls them.

Counted are products of matrices, convolutions, attention and recurrent layers. A multiplication
and an addition are two FLOP.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from samecurve.torch_engine.model.nondeterministic_calls import NondeterministicCalls

Formula = Callable[..., int]  # FLOP of an operation's arguments, and of its result as out_val


class TooManyOperationsError(Exception):
    """A forward pass has more operations than are counted."""


class WorkCounter(TorchDispatchMode):
    """Counts what torch computes while it is entered.

    most: operations, after which counting ends with TooManyOperationsError; None: no end

    flops: of all operations with a formula
    operations: those that compute something, not views; convolutions are among them
    unknown: names of kernels that torch did not bring along, whose FLOP nobody can know
    nondeterministic: calls of operations without a deterministic kernel on GPUs
    """

    def __init__(self, most: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._most = most
        self.flops = self.operations = self.convolutions = 0
        self.unknown: dict[str, None] = {}
        self.nondeterministic = NondeterministicCalls()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else the first operation imports torch's compiler, for as long as all of torch takes."""
        return False

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        result = func(*args, **options)
        if func.is_view:
            return result
        self.operations += 1
        if self._most is not None and self.operations > self._most:
            raise TooManyOperationsError(f"more than {self._most} operations")
        self.nondeterministic.see(func, args, options)
        packet = func.overloadpacket
        formula = _OWN_FORMULAS.get(packet) or flop_registry.get(packet)
        if formula is not None:
            self.flops += formula(*args, **options, out_val=result)
            self.convolutions += packet in _CONVOLUTIONS
        elif func.namespace not in _TORCH_NAMESPACES:
            self.unknown[str(func)] = None
        return result


def _cpu_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_others: Any, **_options: Any
) -> int:
    """FLOP of a forward pass of attention in the kernel for CPUs: its two products."""
    *heads, queries, width = query.shape
    keys, value_width = key.shape[-2], value.shape[-1]
    return 2 * math.prod(heads) * queries * keys * (width + value_width)


def _cpu_attention_backward(
    _gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_others: Any,
    **_options: Any,
) -> int:
    """FLOP of its backward pass: the scores once more, and four products for the gradients."""
    return _cpu_attention(query, key, value) * 5 // 2


def _recurrent_layer(
    steps: torch.Tensor, inputs: torch.Tensor, hidden: torch.Tensor, *_others: Any, **_options: Any
) -> int:
    """FLOP of one direction of a recurrent layer.

    steps: [time, batch, width] or [batch, time, width]; inputs, hidden: its two matrices
    """
    rows = steps.numel() // steps.shape[-1]
    return 2 * rows * (inputs.numel() + hidden.numel())


_aten = torch.ops.aten
# kernels for CPUs that torch's own table lacks
_OWN_FORMULAS: Mapping[Any, Formula] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention,  # noqa: SLF001 - aten's name
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: (  # noqa: SLF001 - aten's name
        _cpu_attention_backward
    ),
    _aten.mkldnn_rnn_layer: _recurrent_layer,
}
_CONVOLUTIONS = frozenset(
    packet for packet in flop_registry if "conv" in str(packet) and "backward" not in str(packet)
)
_TORCH_NAMESPACES = frozenset({"aten", "prim", "prims", "profiler"})
