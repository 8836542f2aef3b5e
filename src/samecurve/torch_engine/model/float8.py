"""train.float8: products of the blocks' linear layers in eight bits, scaled by each tensor's
largest value as it is; weights stay in f32. By torchao, imported late.
"""

import torch
from torch import nn

from samecurve.errors import UserError
from samecurve.torch_engine.model.model_setup import repeated_blocks

_MULTIPLE = 16  # of both sizes of a matrix: what the kernels take
_CAPABLE = (8, 9)  # compute capability: Ada, Hopper and newer


def convert(model: nn.Module, device: torch.device, *, emulate: bool = False) -> list[str]:
    """Returns the names of the layers it converted; parameters and their names stay.

    emulate: in f32, for a device without such products (tests)

    UserError: this device has none, or no layer fits.
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
