"""Models that carry a state from token to token: state-space, linear attention, convolutions.

The library's path through torch can't begin anew within a row.
"""

from importlib.util import find_spec
from typing import Any

from torch import nn


def is_recurrent(model: nn.Module) -> bool:
    """Whether something but attention passes from one token to the next."""
    config: Any = model.config
    kinds = getattr(config, "layer_types", None) or []
    return (
        bool(getattr(model, "_is_stateful", False))
        or any(isinstance(module, nn.Conv1d) for module in model.modules())
        or any("attention" not in kind or "linear" in kind for kind in kinds)
    )


def kernel_note() -> str:
    """A note on the kernels that state-space layers use on this machine."""
    if find_spec("mamba_ssm") is not None:
        return "state-space layers by mamba_ssm, where they are on a GPU"
    return "state-space layers by the library's own path through torch, as mamba_ssm is absent"
