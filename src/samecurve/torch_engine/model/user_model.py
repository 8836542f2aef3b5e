"""A model as a task's model() gives it, made one that strategies can lay out: without wrappers that
lay it out themselves, and without those of torch.compile, whose names would be in checkpoints.
"""

import sys
from typing import Any

from torch import nn

from samecurve.errors import UserError

_LAYS_OUT = ("torch.nn.parallel.", "torch.distributed.fsdp.", "accelerate.", "deepspeed.")


def plain_model(model: nn.Module, what: str) -> nn.Module:
    """The model itself, on the host. Parts that torch.compile had wrapped are compiled in place.

    what: that gave it, for errors

    UserError: it is laid out on devices already.
    """
    for name, module in model.named_modules():
        for kind in type(module).__mro__:
            if f"{kind.__module__}.".startswith(_LAYS_OUT):
                place = f" has {name} as" if name else " returns"
                raise UserError(
                    f"{what}{place} {kind.__name__}, which lays a model out on devices itself",
                    "the module within it, as for one device: --strategy (ddp, fsdp, ...) lays it"
                    " out",
                    "task",
                )
    dynamo: Any = sys.modules.get("torch._dynamo")  # if the task's file compiles
    if dynamo is not None:
        model = _without_wrappers(model, dynamo.OptimizedModule, {})
    if any(tensor.is_cuda for tensor in [*model.parameters(), *model.buffers()]):
        model = model.to("cpu")  # the strategy's device need not be the one that it chose
    return model


def compiled_in_place(model: nn.Module) -> bool:
    """Whether the user compiles parts of it."""
    return any(module._compiled_call_impl is not None for module in model.modules())  # noqa: SLF001


def _without_wrappers(module: Any, wrapper: Any, inner: dict[int, nn.Module]) -> nn.Module:
    """inner: what was found in each wrapper, which may stand in several places."""
    if isinstance(module, wrapper):
        within = module._orig_mod  # noqa: SLF001 - torch.compile's name, also in state dicts
        if id(module) not in inner:
            inner[id(module)] = _without_wrappers(within, wrapper, inner)
            # As Module.compile() does:
            within._compiled_call_impl = module.dynamo_ctx(within._call_impl)  # noqa: SLF001
        return inner[id(module)]
    for name, child in module._modules.items():  # noqa: SLF001 - named_children() gives each once
        if child is not None:
            module._modules[name] = _without_wrappers(child, wrapper, inner)  # noqa: SLF001
    result: nn.Module = module
    return result
