"""Parameters that a loss does not use: found at the first step and named, since their gradients
could not be added up.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from samecurve.errors import UserError
from samecurve.torch_engine.process_group import Comm


def params_reached_by(loss: torch.Tensor) -> set[int]:
    """Ids of the parameters that backward from `loss` would give a gradient."""
    found: set[int] = set()
    seen: set[Any] = set()
    ahead: list[Any] = [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        ahead += [following for following, _ in node.next_functions]
    return found


def check_used(
    names: Sequence[str],
    used: Iterable[bool],
    comm: Comm,
    device: torch.device,
    by_one: bool = False,
) -> None:
    """UserError, on every rank: a parameter that one of them does not use; by_one: that none of
    them uses.
    """
    unused = torch.tensor([float(not one) for one in used], dtype=torch.float64, device=device)
    found = [
        name
        for name, count in zip(names, comm.all_reduce(unused)().tolist(), strict=True)
        if count > (comm.world_size - 1 if by_one else 0)
    ]
    if found:
        shown = f"{', '.join(found[:4])}{f' and {len(found) - 4} more' if len(found) > 4 else ''}"
        raise UserError(
            f"the loss does not use {shown}",
            "take them out of the model, or freeze them: parameter.requires_grad_(False) there, or"
            " optimizer.groups in the config",
            "model",
        )


def trainable(named: Iterable[tuple[str, torch.nn.Parameter]]) -> Mapping[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in named if parameter.requires_grad}
