"""The cost of a sample, as a plan needs it: operations, and the bytes kept for the backward pass.

Both are counted by running the model on tensors without values, under autocast too.
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from samecurve.torch_engine.model.counted_work import WorkCounter
from samecurve.torch_engine.model.model_setup import KeptProducts, repeated_blocks
from samecurve.torch_engine.model.nondeterministic_calls import NondeterministicCalls

Run = Callable[[nn.Module], object]  # calls a model on one row, whose tensors it makes itself


@dataclass
class SavedActivations:
    """The bytes that a forward pass keeps for backward."""

    outside: int = 0  # kept outside of the blocks
    blocks: list[int] = field(default_factory=list)  # kept by each block
    inputs: list[int] = field(default_factory=list)  # of each block's first argument
    products: list[int] = field(default_factory=list)  # of each block, kept by "selective"
    widest: int = 0  # the largest activation of a block
    nondeterministic: tuple[str, ...] = ()  # operations without a deterministic kernel on GPUs

    @property
    def total(self) -> int:
        return self.outside + sum(self.blocks)

    def recomputed(self, how: str) -> int:
        """Bytes at the peak where blocks run again in backward, one after the other.

        how: block or selective
        """
        return self.outside + sum(self._kept(how)) + self.rerun(how)

    def rerun(self, how: str) -> int:
        """Bytes of the largest block that runs again, and of its widest activation's gradient."""
        kept = self._kept(how)
        again = [whole - part for whole, part in zip(self.blocks, kept, strict=True)]
        return max(again, default=0) + self.widest

    def _kept(self, how: str) -> list[int]:
        """Bytes that each block keeps until it runs again."""
        if how == "block":
            return self.inputs
        return [first + rest for first, rest in zip(self.inputs, self.products, strict=True)]


def saved_facts(wide: SavedActivations, narrow: SavedActivations, times: int = 1) -> dict[str, Any]:
    """The fields of Facts that follow from what was counted.

    wide: counted in a forward pass in float32; narrow: in the same pass under autocast
    times: forward passes for each sample
    """
    ways = ("block", "selective") if wide.blocks else ()
    return {
        "bytes_per_sample": wide.total * times,
        "nondeterministic": wide.nondeterministic,
        "rerun_share": {
            how: min(saved.rerun(how) / saved.recomputed(how) for saved in (wide, narrow))
            for how in ways
        },
        "recompute_bytes": {how: wide.recomputed(how) * times for how in ways},
        "autocast_bytes": {
            "none": narrow.total * times,
            **{how: narrow.recomputed(how) * times for how in ways},
        },
    }


def count_saved(
    model: nn.Module, blocks: Sequence[nn.Module], run: Callable[[], object]
) -> SavedActivations:
    """Count what a forward pass keeps for backward.

    Weights are not counted, and neither are their copies in two bytes. A tensor that several
    operations keep is counted once.

    run: the forward pass; its tensors and the model's have no values (FakeTensor)
    """
    saved = SavedActivations()
    counter = _Counter(model, saved)
    handles = []
    for block in blocks:
        handles.append(block.register_forward_pre_hook(counter.enter))
        handles.append(block.register_forward_hook(counter.leave))
    try:
        with saved_tensors_hooks(counter.save, _as_it_is), _Operations(counter) as operations:
            run()
    finally:
        for handle in handles:
            handle.remove()
    saved.nondeterministic = operations.nondeterministic.names
    return saved


class _Counter:
    """Counts the tensors that autograd saves, by the block in which that happens."""

    def __init__(self, model: nn.Module, saved: SavedActivations) -> None:
        self._saved = saved
        # storages are held here, so that no new storage can get the key of a freed one
        self._seen: dict[int, Any] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            self._is_new(tensor)
        self._weights = set(self._seen)
        self._keeps: KeptProducts | None = None  # of the running block; None: outside of blocks

    def enter(self, _block: nn.Module, arguments: tuple[Any, ...]) -> None:
        first = arguments[0] if arguments else None
        self._saved.blocks.append(0)
        self._saved.products.append(0)
        self._saved.inputs.append(_bytes(first) if isinstance(first, torch.Tensor) else 0)
        self._keeps = KeptProducts()

    def leave(self, _block: nn.Module, _arguments: object, _output: object) -> None:
        self._keeps = None

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._is_new(tensor):
            if self._keeps is not None:
                self._saved.blocks[-1] += _bytes(tensor)
                self._saved.widest = max(self._saved.widest, _bytes(tensor))
            else:
                self._saved.outside += _bytes(tensor)
        return tensor

    def see(self, operation: object, first: object, result: Any) -> None:
        """Note an operation. first: its first argument"""
        if operation is torch.ops.aten._to_copy.default:  # noqa: SLF001 - aten's name
            is_weight = isinstance(first, torch.Tensor) and _key(first) in self._weights
            if is_weight and isinstance(result, torch.Tensor):
                self._is_new(result)
        elif self._keeps is not None and self._keeps.is_kept(operation, is_recompute=False):
            kept = result[0] if isinstance(result, tuple) else result
            self._saved.products[-1] += _bytes(kept)

    def _is_new(self, tensor: torch.Tensor) -> bool:
        key = _key(tensor)
        if key in self._seen:
            return False
        self._seen[key] = tensor.untyped_storage()
        return True


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows every operation to the counter."""

    def __init__(self, counter: _Counter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counter = counter
        self.nondeterministic = NondeterministicCalls()

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.nondeterministic.see(func, args, kwargs or {})
        self._counter.see(func, args[0] if args else None, result)
        return result


def _key(tensor: torch.Tensor) -> int:
    """The key of a tensor's storage."""
    key: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - its identity; public nowhere
    return key


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def forward_costs(make_model: Callable[[], nn.Module], run: Run) -> dict[str, Any]:
    """Fields of Facts about what a sample costs."""
    wide = _saved(make_model, run, nullcontext())
    narrow = _saved(make_model, run, torch.autocast("cpu", dtype=torch.bfloat16))
    formulas = {
        "flops": "3 x those of a forward pass, counted by torch on tensors without values",
        "bytes_per_sample": "what the model keeps of a row, counted on tensors without values",
    }
    return {
        "flops_per_sample": 3.0 * _forward_flops(make_model, run),
        "formulas": formulas,
        **saved_facts(wide, narrow),
    }


def _forward_flops(make_model: Callable[[], nn.Module], run: Run) -> int:
    from torch._subclasses.fake_tensor import FakeTensorMode

    counter = WorkCounter()
    with torch.device("meta"):
        model = make_model()
    # not on meta, whose layers can't ask whether autocast is on
    with FakeTensorMode(), torch.no_grad():
        to_empty(model)
        with counter:
            run(model)
    return counter.flops


def _saved(
    make_model: Callable[[], nn.Module],
    run: Run,
    precision: AbstractContextManager[object],
) -> SavedActivations:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with torch.device("meta"):
        model = make_model()
    with FakeTensorMode():
        to_empty(model)
        with precision, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of slower kernels: nothing is computed
            return count_saved(model, repeated_blocks(model), lambda: run(model))


def to_empty(model: nn.Module) -> None:
    """Make a model's tensors CPU tensors without values, where module.to_empty() fails."""
    others: dict[int, nn.Parameter] = {}  # tied parameters stay tied
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in others:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                others[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
            module.register_parameter(name, others[id(parameter)])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))
