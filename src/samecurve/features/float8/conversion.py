"""The conversion of the blocks' linear layers to products in eight bits.

Each tensor is scaled by its present largest value. Weights stay in f32. torchao does the work; it
is imported late.
"""

import torch
from torch import nn

from samecurve.errors import UserError
from samecurve.torch_engine.model.model_setup import repeated_blocks

_MULTIPLE = 16  # the kernels take matrices whose two sizes are multiples of this
_CAPABLE = (8, 9)  # least compute capability: Ada, Hopper and newer


def convert(model: nn.Module, device: torch.device, *, emulate: bool = False) -> list[str]:
    """Convert the linear layers of the repeated blocks. Parameters and their names stay.

    emulate: compute in f32, for a device without eight-bit products (tests)

    Returns the names of the converted layers.

    UserError: this device has no eight-bit products, or no layer fits.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    if not emulate and torch.cuda.get_device_capability(device) < _CAPABLE:
        raise UserError(
            f"train.float8: {torch.cuda.get_device_name(device)} has no products in eight bits",
            "leave train.float8 out: bf16 is its fastest format",
            "train.float8",
        )
    in_blocks = {id(module) for block in repeated_blocks(model) for module in block.modules()}
    fit = {
        name
        for name, module in model.named_modules()
        if id(module) in in_blocks
        and type(module) is nn.Linear
        and not any(size % _MULTIPLE for size in module.weight.shape)
    }
    if not fit:
        raise UserError(
            "train.float8: no linear layer of a repeated block has sizes that are multiples of"
            f" {_MULTIPLE}",
            "sizes that are, or leave train.float8 out",
            "train.float8",
        )
    convert_to_float8_training(
        model,
        module_filter_fn=lambda _module, name: name in fit,
        config=Float8LinearConfig(emulate=emulate),
    )
    return sorted(fit)
