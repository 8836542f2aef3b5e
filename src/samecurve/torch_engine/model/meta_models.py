"""Models without values: their names, shapes and types."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# Methods and functions of nn.init that give a tensor other values in place: nothing happens on
# meta, but torch imports its compiler to find that out, which takes half as long as all of torch.
_IN_PLACE = ("normal_", "log_normal_", "exponential_", "cauchy_", "geometric_", "erfinv_", "clamp_")


@contextmanager
def on_meta() -> Iterator[None]:
    """Let tensors that are made within have no values."""
    with torch.device("meta"), _WithoutValues():
        yield


class _WithoutValues(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        if func.__name__ in _IN_PLACE:
            tensor = args[0] if args else options["tensor"]  # as nn.init passes it on
            if tensor.is_meta:
                return tensor
        return func(*args, **options)
