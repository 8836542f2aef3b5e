"""The blocks of a model whose frozen weights can lie in host memory.

A block is the unit that is copied to the device at once. The plan counts the same blocks, on a
model without values, as the engine moves.
"""

from collections import Counter
from dataclasses import dataclass

from torch import nn

from samecurve.torch_engine.model.model_setup import repeated_blocks

# A block is taken apart where the repeated blocks within it hold this share of its frozen numbers.
# Buffers of the size of a UNet's largest stage would take most of what is saved.
_NEARLY_ALL = 0.9


@dataclass(frozen=True)
class FrozenBlock:
    """A block with frozen parameters that no other module uses."""

    module: nn.Module  # its call finds the parameters on the device
    places: tuple[tuple[nn.Module, str], ...]  # of each parameter: its module, its name there

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [module.get_parameter(name) for module, name in self.places]


def frozen_blocks(model: nn.Module) -> list[FrozenBlock]:
    """The blocks with frozen parameters, in the model's order. It may be on the meta device."""
    uses = Counter(
        id(parameter)
        for module in model.modules()
        for _, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    )
    blocks = [_block(part, uses) for whole in repeated_blocks(model) for part in _parts(whole)]
    return [block for block in blocks if block.places]


def _block(part: nn.Module, uses: Counter[int]) -> FrozenBlock:
    places = tuple(
        (module, name)
        for module in part.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if not parameter.requires_grad and parameter.numel() and uses[id(parameter)] == 1
    )
    return FrozenBlock(part, places)


def _parts(block: nn.Module) -> list[nn.Module]:
    """The block itself, or the repeated blocks within it that hold nearly all of it."""
    inner = repeated_blocks(block)
    within = sum(map(_frozen_numbers, inner))
    if not inner or within < _NEARLY_ALL * _frozen_numbers(block):
        return [block]
    return [part for one in inner for part in _parts(one)]


def _frozen_numbers(part: nn.Module) -> int:
    return sum(one.numel() for one in part.parameters() if not one.requires_grad)
