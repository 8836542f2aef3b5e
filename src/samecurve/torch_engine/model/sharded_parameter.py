"""A parameter of which each process keeps some rows, as it stands in its module.

An optimizer, a checkpoint and a digest see the rows (`own_rows`). Code of a model that reads the
parameter in a forward or backward pass is given the whole weight, which is gathered if need be.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

# what a parameter says of itself without its values: names of methods and attributes
_WITHOUT_VALUES = frozenset(
    {
        *("shape", "size", "ndim", "dim", "ndimension", "numel", "nelement", "stride", "__len__"),
        *("dtype", "itemsize", "nbytes", "element_size", "is_floating_point", "is_complex"),
        *("device", "is_cpu", "is_cuda", "is_meta", "layout", "is_sparse", "is_nested"),
        *("is_contiguous", "is_leaf", "requires_grad", "requires_grad_", "grad_fn", "output_nr"),
        *("_version", "_backward_hooks", "_post_accumulate_grad_hooks", "is_quantized"),
        *("is_mkldnn", "is_xpu", "is_mps", "is_sparse_csr", "is_inference", "is_conj", "is_neg"),
    }
)
# what gives the same parameter again, for those who look at its rows
_ITSELF = frozenset({"detach", "data"})


class ShardedParameter(nn.Parameter):
    """Has the shape of the whole weight, and no values but those of this process's rows.

    own_rows: this process's rows, and their gradient
    first_row: the number of the first of them in the whole weight
    is_cut: whether other processes have other rows; otherwise each has the whole weight
    """

    own_rows: nn.Parameter
    first_row: int
    is_cut: bool
    _gathered: Callable[[], torch.Tensor | None]  # the whole weight; None: no pass is at work

    @classmethod
    def of(
        cls,
        outline: torch.Tensor,
        own_rows: nn.Parameter,
        gathered: Callable[[], torch.Tensor | None],
        *,
        first_row: int,
        is_cut: bool,
    ) -> "ShardedParameter":
        """outline: a tensor of the whole weight's form, whose values are never read"""
        parameter = cls(outline, requires_grad=own_rows.requires_grad)
        parameter.own_rows, parameter._gathered = own_rows, gathered
        parameter.first_row, parameter.is_cut = first_row, is_cut
        return parameter

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient of this process's rows."""
        return self.own_rows.grad

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        self.own_rows.grad = gradient

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        options = kwargs or {}
        name = func.__name__
        if name in {"__get__", "__set__"}:  # of an attribute
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        if name in _WITHOUT_VALUES:
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - as torch's docs have it
                return func(*args, **options)
        if name in _ITSELF and len(args) == 1 and args[0]._gathered() is None:  # noqa: SLF001 - own
            return args[0]._alias()  # noqa: SLF001 - own
        args, options = tree_map_only(ShardedParameter, _whole, (args, options))
        return func(*args, **options)

    def _alias(self) -> "ShardedParameter":
        """The same rows, as detach() gives them."""
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - as above
            outline = self.detach().as_subclass(torch.Tensor)
        own = nn.Parameter(self.own_rows.detach(), requires_grad=False)
        form = {"first_row": self.first_row, "is_cut": self.is_cut}
        return ShardedParameter.of(outline, own, self._gathered, **form)  # type: ignore[arg-type]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        del tensor_contents
        return f"ShardedParameter(shape={tuple(self.shape)}, own={tuple(self.own_rows.shape)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return deepcopy(_whole(self), memo)


def _whole(parameter: ShardedParameter) -> torch.Tensor:
    """RuntimeError: no pass is at work, in which all ranks gather the weight."""
    whole = parameter._gathered()  # noqa: SLF001 - of this module
    if whole is None:
        raise RuntimeError(
            "fsdp: a weight is read outside of loss() and what it calls, where each rank has only a"
            " part of it"
        )
    return whole
