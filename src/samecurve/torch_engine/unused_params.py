"""Parameters that a loss does not use: found at the first step and named, since their gradients
could not be added up.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from samecurve.errors import UserError
from samecurve.torch_engine.process_group import Comm

if TYPE_CHECKING:
    from torch.autograd.graph import Node


def params_reached_by(loss: torch.Tensor) -> set[int]:
    """Ids of the parameters that backward from `loss` would give a gradient."""
    reached: set[int] = set()
    visited: set[Node] = set()
    ahead: list[Node | None] = [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if hasattr(node, "variable"):  # where a leaf's gradient is accumulated
            reached.add(id(node.variable))
        ahead += [following for following, _ in node.next_functions]
    return reached


def check_used(
    used: Mapping[str, bool], comm: Comm, device: torch.device, *, by_any_rank: bool = False
) -> None:
    """UserError, on every rank: a parameter that one of them does not use.

    used: by the parameter's name, on this rank
    by_any_rank: it is enough that one rank uses it
    """
    flags = [float(not is_used) for is_used in used.values()]
    unused = torch.tensor(flags, dtype=torch.float64, device=device)
    most = comm.world_size - 1 if by_any_rank else 0
    counts = comm.all_reduce(unused)().tolist()
    names = [name for name, count in zip(used, counts, strict=True) if count > most]
    if names:
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        raise UserError(
            f"the loss does not use {', '.join(names[:4])}{more}",
            "take them out of the model, or freeze them: parameter.requires_grad_(False) there, or"
            " optimizer.groups in the config",
            "model",
        )
