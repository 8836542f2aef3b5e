"""The blocks of a denoiser, by what the models of diffusers declare themselves."""

from collections.abc import Iterator

from torch import nn


def whole_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that diffusers keeps on one device, and that hold no other such module; beside
    them the other parts of the lists that they lie in (what samples a UNet's pictures up or down).

    A model of diffusers names the classes of such modules in `_no_split_modules`.
    """
    kinds: set[str] = set()
    for module in model.modules():
        kinds.update(getattr(module, "_no_split_modules", None) or ())
    return list(_blocks(model, frozenset(kinds), in_list=False))


def _blocks(module: nn.Module, kinds: frozenset[str], *, in_list: bool) -> Iterator[nn.Module]:
    """The blocks of a module: itself, or those inside it. in_list: it is a part of a ModuleList"""
    inner = [part for part in module.modules() if part is not module and _is_of(part, kinds)]
    is_block = _is_of(module, kinds) or in_list
    if is_block and not inner and any(True for _ in module.parameters()):
        yield module
        return
    for child in module.children():
        yield from _blocks(child, kinds, in_list=isinstance(module, nn.ModuleList))


def _is_of(module: nn.Module, kinds: frozenset[str]) -> bool:
    return type(module).__name__ in kinds
